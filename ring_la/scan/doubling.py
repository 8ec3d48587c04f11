"""Recursive doubling (Hillis & Steele, "Data parallel algorithms", CACM 29(12), 1986).

After round d every link knows the composite map of the 2^d links up to and including itself; in each round it
receives its 2^d-th predecessor's composite and composes. log₂ n rounds of S+M bytes for n links: for long chains.
The composite of the links *before* each link is carried along, so the scan is exclusive without another hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group, Pending
from .all_gather import pack, unpack
from .chain import Chain
from .strategy import Cost, Link, Messages, Steps, sizes


class Doubling:
    name = "doubling"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        rounds, received, composed, distance = [], dict.fromkeys(chain.owners, 0), 0, 1
        while distance < len(chain):
            into = dict.fromkeys(chain.owners, 0)
            receivers = [i for i in range(distance, len(chain)) if _reaches(chain, i, distance)]
            for i in receivers:
                into[chain.owners[i]] += chain.owners[i] != chain.owners[i - distance]
            if receivers:
                rounds.append(Messages("swap", max(into.values()) * sum(sizes(like))))
                composed += 2 * chain.slots()  # the map of the links before, and with this one
            received = {rank: n + into[rank] for rank, n in received.items()}
            distance *= 2
        received = max(received.values()) * sum(sizes(like))
        operations = 6 * chain.slots() * len(rounds)
        copied = chain.slots() * len(rounds) * sum(sizes(like))
        return Cost(received, tuple(rounds), 0, composed, copied, 2 * len(rounds), operations)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Pending:
        result: list[Tensor | None] = [None] * len(links)
        return Steps(self._rounds(chain, links, like, group, result), result, links, group)

    def _rounds(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None]
    ) -> Iterator[None]:
        mine = chain.local(group.rank)
        upto = dict(zip(mine, (link.map for link in links)))
        before: dict[int, Affine | None] = dict.fromkeys(mine)
        distance = 1
        while distance < len(chain):
            receivers = [i for i in range(distance, len(chain)) if _reaches(chain, i, distance)]
            received = self._round(chain, receivers, distance, upto, like, group)
            yield
            for i, earlier in received().items():
                here = before[i]
                before[i] = earlier if here is None else here.after(earlier)
                if chain.passes[i]:
                    upto[i] = upto[i].after(earlier)
            distance *= 2
        for slot, i in enumerate(mine):
            here = before[i]
            result[slot] = None if here is None else here.b

    @staticmethod
    def _round(chain: Chain, receivers: list[int], distance: int, upto: dict[int, Affine], like: Affine, group: Group):
        """Post one round; the returned function waits and gives the composite each owned receiver gets."""
        me = group.rank
        local = {i: upto[i - distance] for i in receivers if chain.owners[i] == me == chain.owners[i - distance]}
        out = [i for i in receivers if chain.owners[i - distance] == me != chain.owners[i]]
        into = [i for i in receivers if chain.owners[i] == me != chain.owners[i - distance]]
        sends, receives = {}, {}
        for peer in {chain.owners[i] for i in out}:
            maps = [upto[i - distance] for i in out if chain.owners[i] == peer]
            sends[peer] = pack(maps, len(maps), like)
        for peer in {chain.owners[i - distance] for i in into}:
            count = sum(chain.owners[i - distance] == peer for i in into)
            receives[peer] = torch.empty_like(pack([], count, like))
        pending = group.exchange(sends, receives)

        def received() -> dict[int, Affine]:
            maps = {peer: iter(unpack(t, like)) for peer, t in pending.wait().items()}
            return local | {i: next(maps[chain.owners[i - distance]]) for i in into}

        return received


def _reaches(chain: Chain, link: int, distance: int) -> bool:
    """Whether anything from `distance` links back and beyond can reach the state entering `link`."""
    return chain.needs[link] and chain.first_source(link) <= link - distance
