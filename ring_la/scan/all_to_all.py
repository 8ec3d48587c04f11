"""All-to-all: each rank folds the whole chain for its own 1/P of the state, split over heads and value columns.

Two all-to-alls: every rank gets its part of all links' summaries, folds them, and sends each rank the part of the
state that enters its links. A rank receives (P−1)/P·(2S+M) bytes whatever P is. Heads are independent, and so
are value columns under any transition, so the parts never meet; heads are cut into column blocks only as far as
needed to give every rank an equal share (M is then repeated per block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from torch import Tensor

from ..algebra import Affine, transition_shape
from ..comm import Group, Pending
from .all_gather import pack, unpack
from .chain import Chain
from .strategy import Cost, Link, Messages, Steps, fold, sizes


class AllToAll:
    name = "all_to_all"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        if not any(chain.needs):
            return Cost()
        state, transition = sizes(Parts(like, chain.ranks).like())
        rows = (chain.ranks - 1) * chain.slots()
        there, back = rows * (state + transition), rows * state
        path = Messages("exchange", there), Messages("exchange", back)
        applied = chain.applied(range(len(chain)))
        operations = 5 + chain.ranks + len(chain) + applied
        return Cost(there + back, path, applied / chain.ranks, posted=2, operations=operations)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Pending:
        result: list[Tensor | None] = [None] * len(links)
        return Steps(self._steps(chain, links, like, group, result), result, links, group)

    @staticmethod
    def _steps(
        chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None]
    ) -> Iterator[None]:
        if not any(chain.needs):
            return
        parts, slots, ranks = Parts(like, group.size), chain.slots(), range(group.size)
        part, cut = parts.like(), [parts.split(link.map) for link in links]
        pending = group.all_to_all(torch.stack([pack([c[r] for c in cut], slots, part) for r in ranks]))
        yield
        rows = pending.wait()
        owned = [(r, slot, i) for r in ranks for slot, i in enumerate(chain.local(r))]
        maps = {i: unpack(rows[r, slot], part) for r, slot, i in owned}
        entering = fold(chain, maps, range(len(chain)))
        back = like.b.new_zeros(group.size, slots, *part.b.shape)
        for r, slot, i in owned:
            if entering[i] is not None:
                back[r, slot] = entering[i]
        pending = group.all_to_all(back)
        yield
        states = pending.wait()
        for slot, i in enumerate(chain.local(group.rank)):
            result[slot] = parts.join(states[:, slot]) if chain.needs[i] else None


def _numel(m: Affine) -> int:
    shape = transition_shape(m.kind, m.b.shape)
    return 0 if shape is None else shape.numel()


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

    def split(self, m: Affine) -> list[Affine]:
        """The part of `m` each rank folds."""
        b = rearrange(m.b, "... h k (n v) -> ... (h n) k v", n=self.blocks)
        b = self._pad(b, -3).chunk(self.ranks, -3)
        if m.A is None:
            return [Affine(m.kind, None, part) for part in b]
        dim = {"scalar": -1, "diagonal": -2, "dense": -3}[m.kind]
        A = self._pad(m.A.repeat_interleave(self.blocks, dim), dim).chunk(self.ranks, dim)
        return [Affine(m.kind, a, part) for a, part in zip(A, b)]

    def join(self, states: Tensor) -> Tensor:
        """The whole state ``[…, H, K, V]`` from the parts ``[P, …, units, K, V/blocks]``."""
        units = rearrange(states, "p ... u k v -> ... (p u) k v")
        units = units.narrow(-3, 0, self.heads * self.blocks)
        return rearrange(units, "... (h n) k v -> ... h k (n v)", n=self.blocks).contiguous()

    def _pad(self, x: Tensor, dim: int) -> Tensor:
        missing = self.ranks * self.per_rank - x.shape[dim]
        if not missing:
            return x
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([x, x.new_zeros(shape)], dim)
