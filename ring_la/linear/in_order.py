"""Recurrences whose state is no affine function of the state before: runs of tokens one after the other.

Nothing can be composed before the state arrives, so no scan shortens the way: each run of tokens starts from the state
that the one before it leaves, and ranks wait for each other. What keeps them busy are groups of heads, which depend on
nothing of one another: while a rank has the second group, the next rank has the first. Backward goes the other way, and
makes each run again from the state that entered it.

Under a deterministic layout a run is a block, computed as a full one, row by row, always in the same groups of heads;
gradients of what tokens share are added exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only, full_precision
from ..blockwise import BLOCK, exact_sum, fixed
from ..blockwise.sums import part_of
from ..comm import Pending
from ..context import ShardedLayout
from .options import CommonOptions
from .states import final_states, initial_gradient, with_rows, without_rows
from .stretches import DocumentRun, Stretch, on_one_device, on_ranks

GROUPS = 4
"""Groups of heads on a split sequence, at most."""


Body = Callable[..., tuple[Tensor, Tensor]]
"""``body(run, S [B, heads, …], *tokens [B, n, heads, …], *shared [heads, …]) -> (o [B, n, heads, …], S)``."""


@dataclass(frozen=True)
class OrderedCall:
    """A call but for its tensors: the first `tokens` of them have tokens, the others are shared by all. `final`: are
    the states after documents wanted?"""

    body: Body
    tokens: int
    layout: ShardedLayout | None
    stretches: tuple[Stretch, ...]
    packed: bool
    final: bool

    @property
    def pieces(self) -> int:
        return 1 + max((run.piece for s in self.stretches for run in s.runs), default=-1)

    def heads(self, H: int) -> list[slice]:
        """Groups of heads."""
        alone = self.layout is None or (self.layout.world_size == 1 and not fixed(self.layout))
        count = 1 if alone else min(H, GROUPS)
        borders = [H * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in zip(borders, borders[1:])]

    def part(self, run: DocumentRun, heads: slice, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a run and a group of heads."""
        tokens, shared = given[: self.tokens], given[self.tokens :]
        return [t[:, run.start : run.stop, heads] for t in tokens] + [t[heads] for t in shared]

    def computed(self, run: DocumentRun, S: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """o of a run and the state after it."""
        if not fixed(self.layout):
            return self.body(run, S, *given)
        rows = [self._of_row(run, *self.row(b, S, *given)) for b in range(len(S))]
        return torch.cat([o for o, _ in rows]), torch.cat([end for _, end in rows])

    def row(self, b: int, S: Tensor, *given: Tensor) -> list[Tensor]:
        """The state and the tensors of one row of a batch."""
        return [S[b : b + 1], *(t[b : b + 1] for t in given[: self.tokens]), *given[self.tokens :]]

    def _of_row(self, run: DocumentRun, S: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """One row, of a block whose rest is filled up; the state after a shorter one is made of its own tokens."""
        n, own = run.stop - run.start, [t.contiguous() for t in given[: self.tokens]]
        shared = given[self.tokens :]
        filled = [torch.cat([t, t.new_zeros(1, BLOCK - n, *t.shape[2:])], 1) for t in own]
        o, end = self.body(run._replace(stop=run.start + BLOCK), S.contiguous(), *filled, *shared)
        if n < BLOCK:
            end = self.body(run, S.contiguous(), *own, *shared)[1] if self.final else S
        return o[:, :n], end

    def send(self, x: Tensor, to: int) -> Pending:
        assert self.layout is not None
        return self.layout.cp.comm.send(x, to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        assert self.layout is not None
        return self.layout.cp.comm.recv(like.shape, like.dtype, like.device, source).wait()


def in_order(
    body: Body,
    start: Tensor,
    tokens: Sequence[Tensor],
    shared: Sequence[Tensor],
    seen: Sequence[int],
    options: CommonOptions,
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, H, …]`` and the state after each document (None unless it is asked for), given that before each,
    ``start [N, H, …]``.

    Args:
        body: a run of tokens from a state, differentiable.
        tokens: ``[B, T, H, …]``, the first of the shape and dtype of o. shared: ``[H, …]``.
        seen: the position of each document's first token. options: the call's; collective under a layout, and the host
            reads offsets.
    """
    layout, cu_seqlens, final = options.layout, options.cu_seqlens, options.output_final_state
    stretches = on_one_device(tokens[0], cu_seqlens, seen) if layout is None else on_ranks(layout, seen)
    packed = cu_seqlens is not None or (layout is not None and layout.packed)
    call = OrderedCall(body, len(tokens), layout, stretches, packed, final)
    with full_precision(start):
        return _InOrder.apply(call, start, *tokens, *shared)


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: OrderedCall, start: Tensor, *given: Tensor):
        B, H = given[0].shape[0], given[0].shape[2]
        rows = with_rows(start, call.packed)
        o = torch.empty_like(given[0])
        ends = start.new_zeros(B, max(1, call.pieces), *start.shape[1:]) if call.final else None
        groups, sends = call.heads(H), []
        arrived: list[Tensor] = []
        entered: dict[tuple[int, int], int] = {}
        left: list[Tensor] = []
        rank = None if call.layout is None else call.layout.rank
        for stretch in call.stretches:
            mine, left = left, []
            for j, heads in enumerate(groups):
                S = start.new_empty(0)
                if stretch.source is not None:
                    like = rows[:, 0, heads]
                    S = mine[j] if stretch.source == rank else call.receive(like, stretch.source)
                for run in stretch.runs:
                    if run.first:
                        S = rows[:, run.document, heads]
                    else:
                        entered[run.start, j] = len(arrived)
                        arrived.append(S)
                    o[:, run.start : run.stop, heads], S = call.computed(run, S, *call.part(run, heads, given))
                    if ends is not None:
                        ends[:, run.piece, heads] = S
                if stretch.target is not None:
                    left.append(S)
                    if stretch.target != rank:
                        sends.append(call.send(S, stretch.target))
        for message in sends:
            message.wait()
        ctx.call, ctx.count, ctx.entered = call, len(arrived), entered
        ctx.way_back = None if call.layout is None else call.layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(start, *arrived, *given)
        ctx.set_materialize_grads(False)
        return o, None if ends is None else _final(call, ends, start)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None):
        call: OrderedCall = ctx.call
        start, *rest = ctx.saved_tensors
        arrived, given = rest[: ctx.count], rest[ctx.count :]
        do = torch.zeros_like(given[0]) if do is None else do
        if ctx.way_back is not None:
            ctx.way_back()
        dend, rows = _final_gradient(call, dfinal, start), with_rows(start, call.packed)
        dstart = start.new_zeros(given[0].shape[0], max(1, call.pieces), *start.shape[1:])
        grads = [torch.zeros_like(t) for t in given[: call.tokens]]
        groups, sends = call.heads(given[0].shape[2]), []
        shared: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in given[call.tokens :]]
        right: list[Tensor] = []
        rank = None if call.layout is None else call.layout.rank
        for stretch in reversed(call.stretches):
            mine, right = right, []
            for j, heads in enumerate(groups):
                dS = start.new_empty(0)
                if stretch.target is not None:
                    like = rows[:, 0, heads]
                    dS = mine[j] if stretch.target == rank else call.receive(like, stretch.target)
                for run in reversed(stretch.runs):
                    S = rows[:, run.document, heads] if run.first else arrived[ctx.entered[run.start, j]]
                    dS = dend[:, run.document, heads] if run.last else dS
                    own = [S, *call.part(run, heads, given)]
                    dS, found, ofall = _back(call, run, own, do[:, run.start : run.stop, heads], dS)
                    for into, d in zip(grads, found):
                        into[:, run.start : run.stop, heads] = d
                    for of, d in zip(shared, ofall):
                        of[j].append(d)
                    if run.first:
                        dstart[:, run.piece, heads] = dS
                if stretch.source is not None:
                    right.append(dS)
                    if stretch.source != rank:
                        sends.append(call.send(dS, stretch.source))
        for message in sends:
            message.wait()
        grads += [_summed(call, of, t) for of, t in zip(shared, given[call.tokens :])]
        return None, _start_gradient(call, dstart, dend) if ctx.needs_input_grad[1] else None, *grads


def _back(
    call: OrderedCall, run: DocumentRun, own: Sequence[Tensor], do: Tensor, dS: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the state and of the tokens' tensors of a run, which is made again, and what it adds to those of the
    shared ones ``[n, heads, …]``."""
    if not fixed(call.layout):
        first, *found = _gradients(call.body, run, own, do, dS)
        return first, found[: call.tokens], [d[None] for d in found[call.tokens :]]
    made = [
        _gradients(call._of_row, run, call.row(b, *own), do[b : b + 1], dS[b : b + 1])  # each adds by itself
        for b in range(len(dS))
    ]
    tokens, shared = zip(*(d[1 : 1 + call.tokens] for d in made)), zip(*(d[1 + call.tokens :] for d in made))
    return torch.cat([d[0] for d in made]), [torch.cat(d) for d in tokens], [torch.stack(d) for d in shared]


def _gradients(body: Body, run: DocumentRun, own: Sequence[Tensor], do: Tensor, dS: Tensor) -> list[Tensor]:
    """Gradients of a body's tensors."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in own]
        results = body(run, *leaves)
        found = torch.autograd.grad(results, leaves, (do, dS), allow_unused=True)
    return [torch.zeros_like(t) if d is None else d for t, d in zip(leaves, found)]


def _summed(call: OrderedCall, parts: list[list[Tensor]], like: Tensor) -> Tensor:
    """The gradient of what tokens share, of its parts in each group of heads: this rank's part."""
    if any(parts):
        rows = torch.cat([torch.cat(of) for of in parts], 1)
    else:
        rows = like.new_zeros(0, *like.shape)
    return part_of(exact_sum(rows, call.layout), call.layout, like) if fixed(call.layout) else rows.sum(0)


def _final(call: OrderedCall, ends: Tensor, start: Tensor) -> Tensor:
    """The state after each document, on every rank."""
    if call.layout is not None:
        return without_rows(final_states(call.layout, ends, start), call.packed)
    final = with_rows(start.clone(), call.packed)
    for n, run in enumerate(call.stretches[0].runs):
        final[:, run.document] = ends[:, n]
    return without_rows(final, call.packed)


def _final_gradient(call: OrderedCall, dfinal: Tensor | None, start: Tensor) -> Tensor:
    """The gradient of the state after each document, of all ranks' losses, with rows."""
    dfinal = torch.zeros_like(start) if dfinal is None else dfinal
    if call.layout is not None and call.final:
        dfinal = call.layout.cp.comm.all_reduce(dfinal.contiguous()).wait()
    return with_rows(dfinal, call.packed)


def _start_gradient(call: OrderedCall, dstart: Tensor, dend: Tensor) -> Tensor:
    """The gradient of the state before each document, whole on every rank."""
    if call.layout is not None:
        return initial_gradient(call.layout, dstart, dend)
    out = dend.clone()  # of documents without tokens
    for n, run in enumerate(call.stretches[0].runs):
        out[:, run.document] = dstart[:, n]
    return without_rows(out, call.packed)
