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


class PrefixEntry(NamedTuple):
    """The number of a prefix's state, the bytes kept of it, its tokens, and the name of what it was kept after."""

    key: int
    size: int
    length: int
    parent: bytes | None


class Prefixes:
    """Which states are kept, the least recently used ones leaving first, those that go on from others before them.

    Args:
        budget: bytes of states to keep; 0: none.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.size = budget, 0
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()  # by the tokens' SHA-256
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # the same of beginnings without a state

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return any(entry.key == key for entry in self._entries.values())

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
        if not self.budget:
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

    def put(self, ids: Sequence[int], key: int, size: int, parent: int) -> list[int] | None:
        """Keep a state of `size` bytes after `parent` (0: none), if it fits together with those before it.

        Returns:
            The keys of those to forget; None: it is not kept, as it is there or does not fit.
        """
        [name], before = _names(ids, [len(ids)]), next((n for n, e in self._entries.items() if e.key == parent), None)
        if name in self._entries or size + sum(self._entries[n].size for n in self._line(before)) > self.budget:
            return None
        self._entries[name] = PrefixEntry(key, size, len(ids), before)
        self._touch(name)
        self.size += size
        gone = []
        while self.size > self.budget:
            entry = self._entries.popitem(last=False)[1]
            self.size -= entry.size
            gone.append(entry.key)
        return gone

    def remove(self, key: int) -> None:
        """It could not be kept; nothing goes on from it."""
        name = next(n for n, e in self._entries.items() if e.key == key)
        self.size -= self._entries.pop(name).size

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

    return KeptPrefix(parent, length, Prefilled(prompt.logits, [since(state) for state in prompt.states]))


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
