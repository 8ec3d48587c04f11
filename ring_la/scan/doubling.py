"""Recursive doubling (Hillis & Steele, "Data parallel algorithms", CACM 29(12), 1986).

After round d every link knows the composite map of the 2^d links up to and including itself; in each round it
receives its 2^d-th predecessor's composite and composes. log₂ n rounds of S+M bytes for n links: for long chains.
The composite of the links *before* each link is carried along, so the scan is exclusive without another hop.

Backward the same network is walked from its last round to its first, each message the other way. What travels is then
the gradient of the composite's b, S bytes; the transitions it meets are those its rank composed with going forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine, act, transpose
from ..comm import Group
from .all_gather import bare, pack, unpack
from .chain import Chain
from .strategy import Cost, Link, Messages, Stepped, sizes


class Doubling(Stepped):
    name = "doubling"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain, sum(sizes(like)), 0, 2)

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain, sizes(like)[0], 2, 0)

    @staticmethod
    def _cost(chain: Chain, size: int, applied: int, composed: int) -> Cost:
        """`size` bytes of a map are sent; maps applied and composed for each that is received."""
        rounds, received, slots = [], dict.fromkeys(chain.owners, 0), chain.slots()
        for distance, receivers in _rounds(chain):
            into = dict.fromkeys(chain.owners, 0)
            for i in receivers:
                into[chain.owners[i]] += chain.owners[i] != chain.owners[i - distance]
            received = {rank: n + into[rank] for rank, n in received.items()}
            rounds.append(Messages("swap", max(into.values()) * size))
        n = len(rounds) * slots
        most = max(received.values()) * size
        return Cost(most, tuple(rounds), applied * n, composed * n, n * size, 2 * len(rounds), 6 * n)

    def _forward(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None], kept: list
    ) -> Iterator[None]:
        mine = chain.local(group.rank)
        upto = dict(zip(mine, (link.map for link in links)))
        before: dict[int, Affine | None] = dict.fromkeys(mine)
        for distance, receivers in _rounds(chain):
            moved = {(i - distance, i): upto.get(i - distance) for i in receivers}
            received = _post(chain, moved, like, group)
            yield
            for (_, i), earlier in sorted(received().items(), key=lambda at: at[0]):
                here = before[i]
                kept += [None if here is None else here.A, upto[i].A]
                before[i] = earlier if here is None else here.after(earlier)
                if chain.passes[i]:
                    upto[i] = upto[i].after(earlier)
        for slot, i in enumerate(mine):
            here = before[i]
            result[slot] = None if here is None else here.b

    def _back(
        self,
        chain: Chain,
        links: Sequence[Link],
        like: Affine,
        group: Group,
        kept: Sequence,
        result: list[Tensor | None],
    ) -> Iterator[None]:
        """The rounds from the last to the first, each message the other way: the gradient of what it brought."""
        mine, kind = chain.local(group.rank), like.kind
        rounds = list(_rounds(chain))
        owned = [[i for i in receivers if chain.owners[i] == group.rank] for _, receivers in rounds]
        pairs = iter(zip(kept[::2], kept[1::2]))
        transitions = [{i: next(pairs) for i in here} for here in owned]
        before = dict(zip(mine, (link.map.b for link in links[::-1])))  # gradients of the states that enter
        upto: dict[int, Tensor | None] = dict.fromkeys(mine)  # and of those that leave
        first = {i: n for n, here in reversed([*enumerate(owned)]) for i in here}
        for n in reversed(range(len(rounds))):
            distance, receivers = rounds[n]
            moved = {}
            for i in owned[n]:
                A, through = transitions[n][i]
                g = before[i] if n == first[i] else act(kind, transpose(kind, A), before[i])
                if chain.passes[i] and upto[i] is not None:
                    g = Affine(kind, transpose(kind, through), g)(upto[i])
                moved[i, i - distance] = g
            moved = {(i, i - distance): moved.get((i, i - distance)) for i in receivers}
            maps = {at: None if g is None else Affine("identity", None, g) for at, g in moved.items()}
            received = _post(chain, maps, bare(like), group)
            yield
            for (_, i), m in received().items():
                here = upto[i]
                upto[i] = m.b if here is None else here + m.b
        result[:] = [upto[i] for i in mine[::-1]]


def _rounds(chain: Chain) -> Iterator[tuple[int, list[int]]]:
    """(distance, links that receive from that far back) of each round with messages."""
    distance = 1
    while distance < len(chain):
        receivers = [i for i in range(distance, len(chain)) if _reaches(chain, i, distance)]
        if receivers:
            yield distance, receivers
        distance *= 2


def _post(
    chain: Chain, moved: dict[tuple[int, int], Affine | None], like: Affine, group: Group
) -> Callable[[], dict[tuple[int, int], Affine]]:
    """Post one round: maps that go from link to link, known where their source is owned. The returned function waits
    and gives those that come to owned links."""
    me, owners = group.rank, chain.owners
    here = {(a, b): m for (a, b), m in moved.items() if owners[a] == me == owners[b]}
    out = [(a, b) for a, b in moved if owners[a] == me != owners[b]]
    into = [(a, b) for a, b in moved if owners[b] == me != owners[a]]
    sends, receives = {}, {}
    for peer in {owners[b] for _, b in out}:
        maps = [moved[at] for at in out if owners[at[1]] == peer]
        sends[peer] = pack(maps, len(maps), like)
    for peer in {owners[a] for a, _ in into}:
        count = sum(owners[a] == peer for a, _ in into)
        receives[peer] = torch.empty_like(pack([], count, like))
    pending = group.exchange(sends, receives)

    def received() -> dict[tuple[int, int], Affine]:
        maps = {peer: iter(unpack(t, like)) for peer, t in pending.wait().items()}
        return here | {at: next(maps[owners[at[0]]]) for at in into}

    return received


def _reaches(chain: Chain, link: int, distance: int) -> bool:
    """Whether anything from `distance` links back and beyond can reach the state entering `link`."""
    return chain.needs[link] and chain.first_source(link) <= link - distance
