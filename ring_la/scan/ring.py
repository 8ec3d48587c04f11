"""Ring (LASP, arXiv 2404.02882) and pipelined ring (ZeCO's All-Scan, arXiv 2507.01004).

Each link receives the state of its predecessor, applies its own map and sends the result on; the transition A
never leaves its rank. A rank receives S bytes a link; depth is the number of hops, P−1. The pipelined form cuts
the state along its value columns (A mixes key rows only, so columns are independent) and lets hop n of one block
run beside hop n−1 of the next: depth P−2+blocks hops of S/blocks bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group, Pending
from . import mailbox_ring
from .chain import Chain
from .strategy import Cost, Exchange, Link, Messages, Pattern, Steps, applying, sizes

PIPELINE_BLOCKS = 4


class Ring:
    """The chain of hops, in `blocks` blocks of value columns (1: LASP's ring). `mailboxes`: through them where a group
    has some; not for links that push states themselves."""

    def __init__(self, name: str, blocks: int = 1, mailboxes: bool = True) -> None:
        self.name, self.blocks, self.mailboxes = name, blocks, mailboxes and blocks == 1

    def cost(self, chain: Chain, like: Affine, mailboxes: bool = False) -> Cost:
        """`mailboxes`: by one kernel a link (`mailbox_ring`)."""
        state, _ = sizes(like)
        if mailboxes:
            path = Messages("link", state, chain.hops)
            return Cost(chain.arrivals * state, (path,) if chain.hops else (), posted=chain.slots())
        depth = chain.hops + self.blocks - 1 if chain.hops else 0
        pattern: Pattern = "hop" if self.blocks == 1 else "swap"  # in blocks, ranks send while they receive
        path = Messages(pattern, state / self.blocks, depth)
        applied = (depth - 1) / self.blocks if chain.hops > 1 else 0.0
        posted = chain.messages * self.blocks
        cuts = 0 if self.blocks == 1 else chain.slots() * self.blocks + chain.arrivals
        copied = 2 * state * chain.slots() if cuts else 0
        operations = posted + cuts + (applied > 0) * self.blocks * (applying(like) - 1)
        return Cost(chain.arrivals * state, (path,), applied, 0, copied, posted, operations)

    def cost_back(self, chain: Chain, like: Affine, mailboxes: bool = False) -> Cost:
        return self.cost(chain.reversed, like, mailboxes)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Exchange:
        result: list[Tensor | None] = [None] * len(links)
        if self.mailboxes and mailbox_ring.carries(group, like):
            return Steps(mailbox_ring.steps(chain, links, group, result), result, links, group)
        return Steps(self._steps(chain, links, group, result), result, links, group)

    def start_back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None]
    ) -> Pending:
        return self.start(chain.reversed, links, like, group)

    def _steps(self, chain: Chain, links: Sequence[Link], group: Group, result: list[Tensor | None]) -> Iterator[None]:
        """Walk the owned links in chain order; yields before each wait for a message."""
        outgoing: dict[int, list[Tensor]] = {}
        sends: list[Pending] = []
        for slot, (i, link) in enumerate(zip(chain.local(group.rank), links)):
            parts = _columns(link, self.blocks)
            incoming: list[Tensor] = []
            outgoing[i] = []
            if not chain.passes[i]:  # what leaves does not depend on what enters: send first
                outgoing[i] = [part.map.b for part in parts]
                sends += self._send(chain, i, outgoing[i], group)
            for n, part in enumerate(parts):
                state = None
                if chain.needs[i]:
                    if chain.owners[i - 1] == group.rank:
                        state = outgoing[i - 1][n]
                    else:
                        b = part.map.b
                        message = group.recv(b.shape, b.dtype, b.device, chain.owners[i - 1])
                        yield
                        state = message.wait()
                    incoming.append(state)
                if chain.passes[i] and chain.feeds(i):
                    outgoing[i].append(part.out(state, True))
                    sends += self._send(chain, i, outgoing[i][-1:], group)
            if incoming:
                result[slot] = incoming[0] if len(incoming) == 1 else torch.cat(incoming, -1)
        for message in sends:
            yield
            message.wait()

    @staticmethod
    def _send(chain: Chain, i: int, states: list[Tensor], group: Group) -> list[Pending]:
        if not chain.feeds(i) or chain.owners[i + 1] == group.rank:
            return []
        return [group.send(state, chain.owners[i + 1]) for state in states]


def _columns(link: Link, blocks: int) -> list[Link]:
    """The link cut along its value columns."""
    if blocks == 1:
        return [link]
    m = link.map
    return [Link(Affine(m.kind, m.A, b.contiguous())) for b in m.b.chunk(blocks, -1)]


CANONICAL = Ring("ring", mailboxes=False)
"""For links with a `push`, which fold in one order whatever the split."""
