"""The ring by mailboxes as part of a kernel's own scan: where its spans end, the scan goes on at the next rank.

A rank's kernels scan over spans of its tokens anyway. A `MailboxBorder` puts the exchange between those launches, so
that a split call is launched, and replayed, as one on a single device is: `kernels.protocol.Border` is what kernels
know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from ..comm import Group
from ..kernels import SpanMaps
from ..kernels.protocol import Mail
from .chain import Chain
from .mailbox_ring import DenseMaps, ElementwiseMaps, Hop, LinkStates, launch_dense, launch_spans, mail

if TYPE_CHECKING:
    from ..kernels.runtime.streams import SideStream


class MailboxBorder:
    """The launches of one layout's exchange on one rank.

    Args:
        group: one with mailboxes. chain: the layout's. pieces: the first and the last piece of each segment this rank
            owns, in order. count: how many pieces it has.
    """

    def __init__(self, group: Group, chain: Chain, pieces: Sequence[tuple[int, int]], count: int) -> None:
        self.group = group
        back = [(last, first) for first, last in reversed(pieces)]
        self.hops = _hops(chain, group.rank, pieces), _hops(chain.reversed, group.rank, back)
        # one piece, whose states kernels may carry through its spans themselves
        self._mails = chain.slots() == 1 and count == 1
        self.key = (group.name, self._mails, *self.hops)
        self.whole = tuple({hop.piece for hop in hops} == set(range(count)) for hops in self.hops)
        self.carries = tuple(any(_comes(hop) and _goes(hop) for hop in h) for h in self.hops)
        self._sent = tuple(sum(hop.target is not None for hop in hops) for hops in self.hops)
        self.sends = tuple(n > 0 for n in self._sent)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        boxes = self.group.mailboxes
        return boxes.own, boxes.mailboxes, boxes.broken, boxes.report

    @cached_property
    def beside(self) -> SideStream | None:
        from ..kernels.runtime.streams import SideStream

        side = self.group.streams.side
        return None if side is None else SideStream(side)

    def begin(self, size: int, reverse: bool) -> None:
        """Before every call, replayed or not: states of `size` bytes are about to go."""
        self.group.put_by_kernel(self._sent[reverse] * size)
        self.group.mailboxes.order()

    def mail(self, states: tuple[int, int, int], reverse: bool) -> Mail | None:
        return mail(self.group, self.hops[reverse], states) if self._mails else None

    def spans(
        self, maps: SpanMaps, S0: Tensor | None, entering: Tensor, leaving: Tensor, first: Tensor | None,
        reverse: bool, beside: bool, through: Tensor | None = None, final: bool = False,
    ) -> None:  # fmt: skip
        for hop in self.hops[reverse]:
            before = None if hop.earlier is None else leaving
            if S0 is not None and before is None and hop.source is None:  # a document's own first state
                before, hop = S0, hop._replace(earlier=hop.piece, passes=True)
            states = LinkStates(before, entering, leaving if hop.keeps or final else None)
            if maps.kind == "dense":
                whole = None if through is None else (through, leaving)
                dense = DenseMaps(maps.transition, maps.own, maps.zero, maps.squares, first, whole)
                launch_dense(self.group, dense, states, hop, reverse=reverse)
            else:
                spans = ElementwiseMaps(maps.kind, maps.transition, maps.own, first)
                hop = hop._replace(passes=hop.passes or final)
                launch_spans(self.group, spans, states, hop, reverse=reverse, beside=beside)


def _comes(hop: Hop) -> bool:
    return hop.source is not None or hop.earlier is not None


def _goes(hop: Hop) -> bool:
    """Whether what comes may go on."""
    return hop.passes and (hop.target is not None or hop.keeps)


def _hops(chain: Chain, rank: int, pieces: Sequence[tuple[int, int]]) -> tuple[Hop, ...]:
    """The launches of this rank's links in the order of `chain`; `pieces`: where its states enter each and leave it."""
    hops: list[Hop] = []
    last: int | None = None
    for i, (enter, leave) in zip(chain.local(rank), pieces):
        needs, here = chain.needs[i], chain.needs[i] and chain.owners[i - 1] == rank
        source, earlier = chain.owners[i - 1] if needs and not here else None, last if here else None
        follower = chain.owners[i + 1] if chain.feeds(i) else None
        target, keeps = None if follower == rank else follower, follower == rank
        if enter == leave:
            hops.append(Hop(source, target, chain.passes[i], enter, earlier, keeps))
        else:  # nothing passes: what leaves is sent first
            hops += [Hop(None, target, False, leave)] if target is not None else []
            hops += [Hop(source, None, False, enter, earlier)] if needs else []
        last = leave
    return tuple(hops)
