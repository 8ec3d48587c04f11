"""Prompts that were read before, so that one which begins alike is read from there.

What a model remembers of a prompt is a state of every layer: a few MB for recurrences, whatever the prompt's length,
and the keys and values of attention. A state stands for one prefix and cannot be cut back, so where to keep one is
decided when the prompt is read: at its end, where the next turn of a conversation goes on; at the last multiples of
`STRIDES` well before its end, where another question to the same document parts; where it parts from a prompt that was
read before; and at the ends of pieces. What is kept is what came since the last one (`KeptPrefix`), so that keys and
values are kept once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..inference import LayerKeys, Prefilled
from ..nn import KVCache

WIDTH = 8
"""Bytes of a token where tokens are compared."""
STRIDES = (512, 4096)
"""Of each a prompt's state is kept once, at the last multiple with half of it or more to come."""
SEEN = 1 << 16
"""Places in prompts, `STRIDES[0]` tokens apart, that are known again."""


@dataclass
class PrefixEntry:
    """The number of a prefix's state, the bytes kept of it on each rank, its tokens, the name of what it was kept
    after, and where it is: on the model's device (0), in host memory (1) or on disk (2)."""

    key: int
    size: int
    length: int
    parent: bytes | None
    tier: int = 0


class Move(NamedTuple):
    """A kept prefix goes from a tier to another; None: nowhere, it is forgotten.

    Attributes:
        name: its tokens' SHA-256. before: the key of the one before it; 0: none.
    """

    key: int
    source: int
    to: int | None
    name: bytes
    entry: PrefixEntry
    before: int


class Prefixes:
    """Which states are kept, and where. The least recently used ones leave first, those that go on from others before
    them, to the next tier that has room for them.

    Args:
        budgets: bytes of states to keep on the device (0: none), in host memory and on disk.
        parts: whether prompts are read in parts, to keep more than their end.
    """

    def __init__(self, budgets: Sequence[int], parts: bool = True) -> None:
        self.budgets, self.parts, self.sizes = tuple(budgets), parts, [0, 0, 0]
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()  # by the tokens' SHA-256
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # the same of beginnings without a state

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return any(entry.key == key for entry in self._entries.values())

    def ready(self, key: int) -> bool:
        """Whether a state is on the device."""
        return any(entry.key == key and not entry.tier for entry in self._entries.values())

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """The key of the longest prefix of `ids` there is, and its length; ``(0, 0)`` if none."""
        lengths = sorted({e.length for e in self._entries.values() if e.length <= len(ids)})
        found = [name for name in _names(ids, lengths) if name in self._entries]
        if not found:
            return 0, 0
        self._touch(found[-1])
        return self._entries[found[-1]].key, self._entries[found[-1]].length

    def stops(self, ids: Sequence[int], begin: int) -> list[int]:
        """Where to keep a state of a prompt that is read from `begin`, its end last."""
        if not self.budgets[0] or not self.parts:
            return [len(ids)]
        stops, common = {(len(ids) - stride // 2) // stride * stride for stride in STRIDES}, 0
        places, alike = list(range(STRIDES[0], len(ids) + 1, STRIDES[0])), True
        for place, name in zip(places, _names(ids, places)):
            alike = alike and name in self._seen
            if alike:
                common = place
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return sorted({stop for stop in (common, *stops) if stop > begin} | {len(ids)})

    def put(self, ids: Sequence[int], key: int, size: int, parent: int) -> list[Move] | None:
        """Keep a state of `size` bytes after `parent` (0: none), which is on the device, if it fits together with those
        before it.

        Returns:
            What has to leave the device first; None: it is not kept, as it is there or does not fit.
        """
        [name], before = _names(ids, [len(ids)]), self._name(parent) if parent else None
        if name in self._entries or size + sum(self._entries[n].size for n in self._line(before)) > self.budgets[0]:
            return None
        self._add(name, PrefixEntry(key, size, len(ids), before))
        return self._settled()

    def add(self, name: bytes, key: int, size: int, length: int, parent: bytes) -> bool:
        """Know a prefix that is on disk, after its parent; whether there is room for it."""
        before = parent or None
        if before is not None and before not in self._entries:
            return False
        line = size + sum(self._entries[n].size for n in self._line(before))
        if line > self.budgets[0] or self.sizes[2] + size > self.budgets[2]:
            return False
        self._add(name, PrefixEntry(key, size, length, before, 2))
        return True

    def raised(self, key: int) -> list[Move]:
        """What has to move for a prefix and those before it to be on the device, in order."""
        line = self._line(self._name(key))[::-1]
        self._touch(line[-1])
        up = [name for name in line if self._entries[name].tier]
        moves = [self._to(name, 0) for name in up]
        return [*self._settled(), *moves]

    def lowered(self) -> list[Move]:
        """What goes to disk where nothing else is to come: all there is room for."""
        moves = []
        for name in sorted(self._entries, key=lambda name: self._entries[name].length):
            entry = self._entries[name]
            after = entry.parent is None or self._entries[entry.parent].tier == 2
            if after and entry.tier < 2 and self.sizes[2] + entry.size <= self.budgets[2]:
                moves.append(self._to(name, 2))
        return moves

    def remove(self, key: int) -> list[Move]:
        """It could not be kept, or moved: it is forgotten, and what goes on from it."""
        return self._forgotten(self._name(key)) if key in self else []

    def _name(self, key: int) -> bytes:
        return next(name for name, entry in self._entries.items() if entry.key == key)

    def _add(self, name: bytes, entry: PrefixEntry) -> None:
        self._entries[name] = entry
        self._touch(name)
        self.sizes[entry.tier] += entry.size

    def _to(self, name: bytes, tier: int | None) -> Move:
        entry = self._entries[name]
        source, before = entry.tier, self._entries[entry.parent].key if entry.parent else 0
        self.sizes[source] -= entry.size
        if tier is not None:
            self.sizes[tier] += entry.size
            entry.tier = tier
        return Move(entry.key, source, tier, name, entry, before)

    def _settled(self) -> list[Move]:
        """Bring each tier's bytes under its budget."""
        moves: list[Move] = []
        for tier, budget in enumerate(self.budgets):
            while self.sizes[tier] > budget:
                name = next(name for name, entry in self._entries.items() if entry.tier == tier)
                entry = self._entries[name]
                below = next((t for t in (1, 2) if t > tier and entry.size <= self.budgets[t]), None)
                if below is None:
                    moves += self._forgotten(name)
                else:
                    moves.append(self._to(name, below))
        return moves

    def _forgotten(self, name: bytes) -> list[Move]:
        """It leaves, and before it what goes on from it."""
        gone = [other for other in self._entries if name in self._line(other)]
        moves = [self._to(other, None) for other in sorted(gone, key=lambda n: -self._entries[n].length)]
        for other in gone:
            del self._entries[other]
        return moves

    def _line(self, name: bytes | None) -> list[bytes]:
        """A prefix and those it was kept after."""
        line = []
        while name is not None:
            line.append(name)
            name = self._entries[name].parent
        return line

    def _touch(self, name: bytes) -> None:
        """It was used, and those before it even later: they leave after it."""
        for each in self._line(name):
            self._entries.move_to_end(each)


def _names(ids: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """The SHA-256 of the beginnings of these lengths, in order."""
    tokens, digest, at, names = memoryview(array("q", ids)).cast("B"), hashlib.sha256(), 0, []
    for length in lengths:
        digest.update(tokens[WIDTH * at : WIDTH * length])
        at = length
        names.append(digest.digest())
    return names


# -- on every rank -----------------------------------------------------------------------------------------


class KeptPrefix(NamedTuple):
    """What a model remembers of a prefix, beyond what is kept of a shorter one."""

    parent: int
    """The key of the shorter one; 0: there is none."""
    begin: int
    """Tokens of the shorter one."""
    length: int
    """Tokens of the whole prefix."""
    since: Prefilled
    """Logits and states; of keys and values those of the tokens since."""


def kept(prompt: Prefilled, length: int, parent: int, known: Mapping[int, KeptPrefix]) -> KeptPrefix:
    """What to keep of a prompt of `length` tokens, after `parent` among what is `known`. Its tensors are its own; keys
    in a `KeyStore` stay where they are, in blocks that the parent has too.
    """
    begin = known[parent].length if parent else 0

    def since(state: Any) -> Any:
        if not isinstance(state, KVCache) or begin == 0:
            return state
        return KVCache(state.k[:, begin:].clone(), state.v[:, begin:].clone(), None)

    return KeptPrefix(parent, begin, length, Prefilled(prompt.logits, [since(state) for state in prompt.states]))


def whole(key: int, known: Mapping[int, KeptPrefix]) -> Prefilled:
    """What the model remembers of the whole prefix."""
    line = [known[key]]
    while line[0].parent:
        line.insert(0, known[line[0].parent])

    def joined(*states: Any) -> Any:
        if len(states) == 1 or not isinstance(states[-1], KVCache):
            return states[-1]
        return KVCache(torch.cat([s.k for s in states], 1), torch.cat([s.v for s in states], 1), None)

    last = line[-1].since
    return Prefilled(last.logits, [joined(*states) for states in zip(*(each.since.states for each in line))])


def size_since(prompt: Prefilled, begin: int) -> int:
    """Bytes of what `kept` keeps on this rank after a prefix of `begin` tokens."""

    def size(state: Any) -> int:
        if isinstance(state, LayerKeys):
            return state.token_bytes * sum(held.here - held.before(begin) for held in state.rows.held)
        if isinstance(state, KVCache):
            return sum(x[:, begin:].nbytes for x in (state.k, state.v))
        return sum(x.nbytes for x in state if x is not None)

    return prompt.logits.nbytes + sum(map(size, prompt.states))
