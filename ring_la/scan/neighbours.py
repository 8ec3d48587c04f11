"""The exchange where nothing passes through a link: each link gets what its predecessor wrote, in one swap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group, Pending
from .chain import Chain
from .strategy import Cost, Exchange, Link, Messages, sizes


class Neighbours:
    """A `Scan` for chains no link of which passes a state on."""

    name = "neighbours"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        state = sizes(like)[0]
        if not chain.arrivals:
            return Cost()
        return Cost(chain.arrivals * state, (Messages("swap", state),), copied=state, posted=2, operations=2)

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        return self.cost(chain.reversed, like)

    def start_back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None]
    ) -> Pending:
        return self.start(chain.reversed, links, like, group)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Exchange:
        me, mine = group.rank, chain.local(group.rank)
        own = {i: link.map.b for i, link in zip(mine, links)}
        crossing = [i for i in range(1, len(chain)) if chain.needs[i] and chain.owners[i - 1] != chain.owners[i]]
        into = {i: chain.owners[i - 1] for i in crossing if chain.owners[i] == me}
        out = {i - 1: chain.owners[i] for i in crossing if chain.owners[i - 1] == me}
        sends = {r: torch.stack([own[i] for i in out if out[i] == r]) for r in set(out.values())}
        rooms = {r: [i for i in into if into[i] == r] for r in set(into.values())}
        receives = {r: like.b.new_empty(len(links_), *like.b.shape) for r, links_ in rooms.items()}
        pending = group.exchange(sends, receives)

        def finish() -> list[Tensor | None]:
            pending.wait()
            states = {i: row for r, links_ in rooms.items() for i, row in zip(links_, receives[r])}
            return [states.get(i, own.get(i - 1)) if chain.needs[i] else None for i in mine]

        return Exchange(finish)
