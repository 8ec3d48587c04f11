"""The forgetting horizon of static decays: which heads no state outlives a link in, decided on the host.

Where a head's log-decay over a whole link is below `FLOOR`, what entered the link is gone when it ends, to rounding:
the transition is zero and the state leaving is what the link itself wrote. Such heads need their neighbour's state
alone. Their states go in one swap, farther ranks are not waited for, and the chosen strategy sees the other heads only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group, Pending
from .chain import Chain
from .neighbours import Neighbours
from .strategy import Cost, Exchange, Link, Scan

FLOOR = {torch.float32: -30.0, torch.float64: -50.0}
"""ln of the unit roundoff, and 14 more: what is left is lost also beside states a million times smaller."""
CUTS = 6
"""Tensor operations that cut a link's heads in two and join what enters it."""


@dataclass(frozen=True)
class Horizon:
    """Heads whose state outlives no link (`near`), and the others (`far`): int64 indices, and how many of each."""

    near: Tensor
    far: Tensor
    counts: tuple[int, int]
    _paid: dict[object, bool] = field(default_factory=dict, compare=False)

    @property
    def all_near(self) -> bool:
        """Whether no transition is of any use."""
        return not self.counts[1]

    @classmethod
    def of(cls, decays: Sequence[float], shortest: int, dtype: torch.dtype, device: torch.device) -> Horizon | None:
        """The split of heads with these log-decays a token over links of at least `shortest` tokens; None: no near."""
        near = [h for h, g in enumerate(decays) if g * shortest < FLOOR[dtype]]
        far = [h for h in range(len(decays)) if h not in near]
        one, other = (torch.tensor(heads, dtype=torch.int64, device=device) for heads in (near, far))
        return cls(one, other, (len(near), len(far))) if near else None

    def pays(
        self,
        chain: Chain,
        like: Affine,
        choose: Callable[[Chain, Affine], Scan],
        price: Callable[[Cost, Affine], float],
    ) -> bool:
        """Whether two exchanges cost less than one, heads cut and joined included, or nothing passes at all.

        A ring receives as much either way.
        """
        if self.all_near or choose(chain, like).name == "ring":
            return self.all_near
        key = (chain, like.b.shape)
        if key not in self._paid:
            near, rest = (_like(like, n) for n in self.counts)
            cut = Cost(operations=CUTS * chain.slots())
            split = price(Neighbours().cost(chain.forgetful, near), near) + price(cut, near)
            split += price(choose(chain, rest).cost(chain, rest), rest)
            self._paid[key] = split < price(choose(chain, like).cost(chain, like), like)
        return self._paid[key]

    def start(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, choose: Callable[[Chain, Affine], Scan]
    ) -> Exchange:
        """Post both exchanges; the result is that of `Scan.start`."""
        if self.all_near:
            return Neighbours().start(chain.forgetful, links, like, group)
        near = Neighbours().start(chain.forgetful, _heads(links, self.near), _like(like, self.counts[0]), group)
        rest = _like(like, self.counts[1])
        far = choose(chain, rest).start(chain, _heads(links, self.far), rest, group)
        return Exchange(lambda: self._together(near, far, like), far.kept)

    def start_back(
        self,
        chain: Chain,
        links: Sequence[Link],
        like: Affine,
        group: Group,
        kept: Sequence[Tensor | None],
        choose: Callable[[Chain, Affine], Scan],
    ) -> Pending:
        """Post both exchanges of gradients; the result is that of `Scan.start_back`."""
        forgetful = chain.forgetful
        if self.all_near:
            return Neighbours().start_back(forgetful, links, like, group, ())
        few = _like(like, self.counts[0])
        near = Neighbours().start_back(forgetful, _heads(links, self.near), few, group, ())
        rest = _like(like, self.counts[1])
        far = choose(chain, rest).start_back(chain, _heads(links, self.far), rest, group, kept)
        return Pending(lambda: self._together(near, far, like))

    def _together(self, near: Pending, far: Pending, like: Affine) -> list[Tensor | None]:
        return [self._joined(n, f, like) for n, f in zip(near.wait(), far.wait())]

    def _joined(self, near: Tensor | None, far: Tensor | None, like: Affine) -> Tensor | None:
        """Heads ``[B, H, K, V]`` together again."""
        if near is None or far is None:
            return None
        out = torch.empty_like(like.b, memory_format=torch.contiguous_format)
        return out.index_copy_(1, self.near, near).index_copy_(1, self.far, far)


def _heads(links: Sequence[Link], heads: Tensor) -> list[Link]:
    """The links of some heads: scalar transitions are ``[B, H]``."""
    maps = [link.map for link in links]
    return [
        Link(Affine(m.kind, None if m.A is None else m.A.index_select(1, heads), m.b.index_select(1, heads)))
        for m in maps
    ]


def _like(like: Affine, heads: int) -> Affine:
    return Affine(like.kind, None, like.b.new_empty(like.b.shape[0], heads, *like.b.shape[2:]))
