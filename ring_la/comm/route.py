"""Rows of tokens moved to the ranks that want them: the one routine behind convert, targets and halos.

A `Route` is made on the host from what every rank wants (global token indices, −1 for "nothing", which comes
out as zero) and who owns what, both known to all ranks from the layout; so no rank asks another anything.
Its gradient travels the same way back and is added to the rows it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..layout import Layout
from .group import Group
from .pending import Pending


class Route:
    """Brings this rank the rows ``wants[rank]`` of a tensor split by `layout`.

    Args:
        layout: the split of the source rows.
        wants: for each rank the global token indices it asks for, int64, −1 where it wants a zero row.
        neighbours: use messages between the pairs of ranks that have something to exchange (halos) rather
            than one all-to-all.
    """

    def __init__(self, layout: Layout, wants: Sequence[Tensor], group: Group, neighbours: bool = False) -> None:
        self.group, self.neighbours = group, neighbours
        me, p = group.rank, layout.world_size
        self.rows, self.length = len(wants[me]), layout.local_length
        asked = []  # per rank: (owner, local index, slot in its want list), without the -1s
        for want in wants:
            slot = torch.nonzero(want >= 0).flatten()
            owner, index = layout.owners_of(want[slot])
            asked.append((owner, index, slot))
        give = [asked[r][1][asked[r][0] == me] for r in range(p)]
        take = [asked[me][2][asked[me][0] == r] for r in range(p)]
        self.give_counts, self.take_counts = [len(g) for g in give], [len(t) for t in take]
        self._give, self._take = torch.cat(give), torch.cat(take)
        as_it_comes = torch.arange(self.rows, device="cpu")
        self._filled = torch.equal(self._take, as_it_comes)  # what comes in stands as it is wanted
        self.silent = all(bool((owner == r).all()) for r, (owner, _, _) in enumerate(asked))

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows to give, slots to fill) on `device`, kept there."""
        if self._give.device != device:
            self._give, self._take = self._give.to(device), self._take.to(device)
        return self._give, self._take

    def start(self, x: Tensor) -> Pending:
        """Post the exchange of rows of ``x [T_local, …]``; the result is ``[rows, …]``."""
        give, take = self.indices(x.device)
        pending = self._move(x.index_select(0, give), self.give_counts, self.take_counts)
        if self._filled:
            return pending
        return Pending(lambda: x.new_zeros(self.rows, *x.shape[1:]).index_copy_(0, take, pending.wait()))

    def start_back(self, grad: Tensor, onto: Tensor | None = None) -> Pending:
        """Post the way back of ``grad [rows, …]``; the result, ``[T_local, …]``, is `onto` (None: 0) with it added."""
        give, take = self.indices(grad.device)
        rows = grad if self._filled else grad.index_select(0, take)
        pending = self._move(rows, self.take_counts, self.give_counts)

        def add() -> Tensor:
            total = grad.new_zeros(self.length, *grad.shape[1:]) if onto is None else onto
            returned = pending.wait()
            return total.index_add_(0, give, returned) if len(give) else total

        return Pending(add)

    def _move(self, x: Tensor, send: list[int], receive: list[int]) -> Pending:
        return self._neighbours(x, send, receive) if self.neighbours else self._all_to_all(x, send, receive)

    def _all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Pending:
        return Pending(lambda: x) if self.silent else self.group.all_to_all_uneven(x, send, receive)

    def _neighbours(self, x: Tensor, send: list[int], receive: list[int]) -> Pending:
        me = self.group.rank
        out = x.new_empty(sum(receive), *x.shape[1:])
        outgoing, incoming = x.split(send), out.split(receive)
        incoming[me].copy_(outgoing[me])
        sends = {r: t for r, t in enumerate(outgoing) if r != me and len(t)}
        receives = {r: t for r, t in enumerate(incoming) if r != me and len(t)}
        pending = self.group.exchange(sends, receives, small=True)
        return Pending(lambda: (pending.wait(), out)[1])

    def __call__(self, x: Tensor, dim: int = 0) -> Tensor:
        """The wanted rows of `x` along `dim`; differentiable."""
        return _Routed.apply(x.movedim(dim, 0), self).movedim(0, dim)


class _Routed(torch.autograd.Function):
    """Posted and waited for at once: in the stream's own order."""

    @staticmethod
    def forward(ctx, x: Tensor, route: Route) -> Tensor:
        ctx.route, ctx.way_back = route, route.group.agreement.way_back()
        with route.group.streams.in_order():
            return route.start(x).wait()

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        ctx.way_back()
        with ctx.route.group.streams.in_order():
            return ctx.route.start_back(grad).wait(), None
