"""All-to-all: each rank folds the whole chain for its own 1/P of the state, split over heads and value columns.

Two all-to-alls: every rank gets its part of all links' summaries, folds them, and sends each rank the part of the
state that enters its links. A rank receives (P−1)/P·(2S+M) bytes whatever P is, (P−1)/P·2S backward, for a rank's
parts of the transitions stay with it. Heads are independent, and so
are value columns under any transition, so the parts never meet; heads are cut into column blocks only as far as
needed to give every rank an equal share (M is then repeated per block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from torch import Tensor

from ..algebra import Affine, transition_shape
from ..comm import Group
from .all_gather import bare, unpack
from .chain import Chain
from .strategy import Cost, Link, Messages, Stepped, applying, fold, sizes


class AllToAll(Stepped):
    name = "all_to_all"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain, like, sizes(Parts(like, chain.ranks).like())[1])

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain.reversed, like, 0)

    @staticmethod
    def _cost(chain: Chain, like: Affine, transition: int) -> Cost:
        """`transition` bytes of a part's map are sent beside its state."""
        if not any(chain.needs):
            return Cost()
        state, _ = sizes(Parts(like, chain.ranks).like())
        rows = (chain.ranks - 1) * chain.slots()
        there, back = rows * (state + transition), rows * state
        path = Messages("exchange", there), Messages("exchange", back)
        applied = chain.applied(range(len(chain)))
        operations = 3 + 3 * chain.slots() + applied * applying(like)
        copied = chain.slots() * ((state + transition) * chain.ranks + 2 * like.b.nbytes)
        return Cost(there + back, path, applied / chain.ranks, 0, copied, 2, operations)

    def _forward(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None], kept: list
    ) -> Iterator[None]:
        if not any(chain.needs):
            return
        parts, slots = Parts(like, group.size), chain.slots()
        pending = group.all_to_all(parts.split([link.map for link in links], slots))
        yield
        rows = pending.wait().view(group.size * slots, -1)
        if like.kind != "identity":
            kept.append(rows)
        maps = unpack(rows, parts.like())
        entering = fold(chain, [maps[row] for row in chain.rows], range(len(chain)))
        yield from _return(chain, parts, entering, group, result)

    def _back(
        self,
        chain: Chain,
        links: Sequence[Link],
        like: Affine,
        group: Group,
        kept: Sequence,
        result: list[Tensor | None],
    ) -> Iterator[None]:
        back = chain.reversed
        if not any(back.needs):
            return
        parts, sent, slots = Parts(like, group.size), Parts(bare(like), group.size), chain.slots()
        pending = group.all_to_all(sent.split([link.map for link in links], slots))
        yield
        gradients = unpack(pending.wait().view(group.size * slots, -1), sent.like())
        forward = unpack(kept[0], parts.like()) if kept else gradients
        maps = [forward[chain.rows[-1 - i]].adjoint(gradients[row].b) for i, row in enumerate(back.rows)]
        yield from _return(back, parts, fold(back, maps, range(len(back))), group, result)


def _return(
    chain: Chain, parts: Parts, entering: list[Tensor | None], group: Group, result: list[Tensor | None]
) -> Iterator[None]:
    """Send each rank its parts of what enters its links."""
    back: list[Tensor | None] = [None] * (group.size * chain.slots())
    for row, state in zip(chain.rows, entering):
        back[row] = state
    if None in back:
        nothing = torch.zeros_like(parts.like().b)
        back = [nothing if state is None else state for state in back]
    pending = group.all_to_all(torch.stack(back).unflatten(0, (group.size, chain.slots())))
    yield
    states = pending.wait().unbind(1)
    for slot, i in enumerate(chain.local(group.rank)):
        result[slot] = parts.join(states[slot]) if chain.needs[i] else None


class Parts:
    """The cut of a map's heads and value columns into `ranks` equal parts: units of (head, column block)."""

    def __init__(self, like: Affine, ranks: int) -> None:
        self.full, self.ranks = like, ranks
        *_, self.heads, _, columns = like.b.shape
        fits = [n for n in range(1, columns + 1) if columns % n == 0]
        even = [n for n in fits if self.heads * n % ranks == 0]
        self.blocks = (
            even[0] if even and even[0] <= ranks else next((n for n in fits if self.heads * n >= ranks), fits[-1])
        )
        self.per_rank = -(-self.heads * self.blocks // ranks)

    def like(self) -> Affine:
        """A map with the shapes of one rank's part: ``[…, units, K, V/blocks]``."""
        *lead, _, k, v = self.full.b.shape
        return Affine(self.full.kind, None, self.full.b.new_empty(*lead, self.per_rank, k, v // self.blocks))

    def split(self, maps: Sequence[Affine], slots: int) -> Tensor:
        """What each rank folds of each map, ``[P, slots·(S+M)/P]``: its part of the first b and A, of the next …"""
        kind, dim = self.full.kind, {"scalar": -1, "diagonal": -2, "dense": -3}.get(self.full.kind)
        part = self.like()
        shape = transition_shape(kind, part.b.shape)
        transition = 0 if shape is None else shape.numel()
        columns = []
        for m in maps:
            b = m.b if self.blocks == 1 else rearrange(m.b, "... h k (n v) -> ... (h n) k v", n=self.blocks)
            columns.append(self._cut(b, -3))
            if m.A is not None and dim is not None:
                columns.append(self._cut(m.A.repeat_interleave(self.blocks, dim) if self.blocks > 1 else m.A, dim))
            elif transition:
                columns.append(b.new_zeros(self.ranks, transition))
        missing = (slots - len(maps)) * (part.b.numel() + transition)
        if missing:
            columns.append(self.full.b.new_zeros(self.ranks, missing))
        return torch.cat(columns, 1)

    def join(self, states: Tensor) -> Tensor:
        """The whole state ``[B, H, K, V]`` from the parts ``[P, B, units, K, V/blocks]``."""
        units = states.movedim(0, -4).flatten(-4, -3)
        if self.blocks == 1:
            return units.narrow(-3, 0, self.heads)
        units = units.narrow(-3, 0, self.heads * self.blocks)
        return rearrange(units, "... (h n) k v -> ... h k (n v)", n=self.blocks)

    def _cut(self, units: Tensor, dim: int) -> Tensor:
        """The units along `dim`, shared out evenly: ``[P, numbers of one rank]``."""
        missing = self.ranks * self.per_rank - units.shape[dim]
        if missing:
            shape = list(units.shape)
            shape[dim] = missing
            units = torch.cat([units, units.new_zeros(shape)], dim)
        return units.unflatten(dim, (self.ranks, self.per_rank)).movedim(dim - 1, 0).reshape(self.ranks, -1)
