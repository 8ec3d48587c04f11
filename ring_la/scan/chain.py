"""The order states travel in: the segments of a layout as links of a chain.

State ``s+1`` entering segment s+1 is ``A_s · S_s + b_s``. Where a document starts inside segment s its
transition is zero, structurally: nothing that entered can leave. All ranks know this from the layout, so
messages that would carry nothing are never sent. The backward pass is the same chain reversed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..layout import Layout


@dataclass(frozen=True)
class Chain:
    """Links in the order the state travels.

    Attributes:
        owners: the rank that owns each link.
        needs: whether the link needs the state of its predecessor.
        passes: whether the state that enters a link can leave it.
    """

    owners: tuple[int, ...]
    needs: tuple[bool, ...]
    passes: tuple[bool, ...]

    @classmethod
    def of(cls, layout: Layout) -> Chain:
        """The chain of a layout's segments, left to right."""
        needs, passes = [], []
        for i, segment in enumerate(layout.segments):
            continues = not layout.starts_document(segment.start)
            needs.append(continues)
            passes.append(continues and len(layout.pieces_of(i)) == 1)
        return cls(tuple(s.owner for s in layout.segments), tuple(needs), tuple(passes))

    @classmethod
    def line(cls, ranks: int) -> Chain:
        """One link a rank, all of one document."""
        joined = (False, *[True] * (ranks - 1))
        return cls(tuple(range(ranks)), joined, joined)

    def __len__(self) -> int:
        return len(self.owners)

    def local(self, rank: int) -> tuple[int, ...]:
        """Links owned by `rank`, in order."""
        return self._owned.get(rank, ())

    @cached_property
    def _owned(self) -> dict[int, tuple[int, ...]]:
        owned: dict[int, list[int]] = {}
        for i, owner in enumerate(self.owners):
            owned.setdefault(owner, []).append(i)
        return {rank: tuple(links) for rank, links in owned.items()}

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Where each link stands when every rank brings as many rows as the most links one owns, in order of ranks."""
        return tuple(owner * self.slots() + self.local(owner).index(i) for i, owner in enumerate(self.owners))

    @cached_property
    def reversed(self) -> Chain:
        """The chain of the gradient, right to left: a link needs what its right neighbour, if fed by it, sends back."""
        followed = (*self.needs[1:], False)[::-1]
        passes = tuple(p and n for p, n in zip(self.passes[::-1], followed))
        return Chain(self.owners[::-1], followed, passes)

    @cached_property
    def forgetful(self) -> Chain:
        """The chain of heads that forget within every link: nothing passes."""
        return Chain(self.owners, self.needs, (False,) * len(self))

    def feeds(self, link: int) -> bool:
        """Whether the successor of `link` needs its outgoing state."""
        return link + 1 < len(self) and self.needs[link + 1]

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that own links."""
        return len(self._owned)

    @cached_property
    def hops(self) -> int:
        """The most messages from rank to rank that any state waits for, one after the other."""
        longest, here = 0, 0
        for i in range(1, len(self)):
            here = (here if self.passes[i - 1] else 0) + (self.owners[i] != self.owners[i - 1]) if self.needs[i] else 0
            longest = max(longest, here)
        return longest

    @cached_property
    def arrivals(self) -> int:
        """The most states any rank receives when each link gets its predecessor's."""
        crossing = Counter(o for i, o in enumerate(self.owners) if i and self.needs[i] and self.owners[i - 1] != o)
        return max(crossing.values(), default=0)

    @cached_property
    def messages(self) -> int:
        """The most messages any rank sends and receives then."""
        ends: Counter[int] = Counter()
        for i in range(1, len(self)):
            if self.needs[i] and self.owners[i - 1] != self.owners[i]:
                ends.update((self.owners[i - 1], self.owners[i]))
        return max(ends.values(), default=0)

    def applied(self, links: Sequence[int]) -> int:
        """How many maps a fold applies to a state, that finds what enters each of `links` from the maps of all."""
        wanted = [i for i in links if self.needs[i]]
        if not wanted:
            return 0
        passing = self._passing
        return passing[max(wanted)] - passing[min(map(self.first_source, wanted)) + 1]

    def folded(self, links: Sequence[int]) -> list[int]:
        """The links whose maps such a fold applies."""
        wanted = [i for i in links if self.needs[i]]
        first = min(map(self.first_source, wanted), default=0)
        return [i for i in range(first + 1, max(wanted, default=0)) if self.passes[i]]

    @cached_property
    def _passing(self) -> tuple[int, ...]:
        """How many of the links before each pass a state on."""
        return tuple(accumulate(self.passes, initial=0))

    def slots(self) -> int:
        """The most links one rank owns."""
        return max(map(len, self._owned.values()))

    def first_source(self, link: int) -> int:
        """The earliest link whose own contribution reaches the state that enters `link`."""
        return self._sources[link]

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        sources = [-1]
        for i, passes in enumerate(self.passes):
            sources.append(sources[i] if passes else i)
        return tuple(sources)
