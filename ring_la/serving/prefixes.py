"""Prompts that were read before, so that one which begins alike is read from there.

What a model remembers of a prompt is a state of every layer: a few MB for recurrences, whatever the prompt's length,
and the keys and values of attention. A state stands for one prefix and cannot be cut back, so one is kept for every
piece of a prompt that was read at once: at its end, where the next turn of a conversation goes on, and at multiples of
the piece's length, where prompts with the same beginning part.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 8
"""Bytes of a token where tokens are compared."""


class Entry(NamedTuple):
    """The number of a prefix's state, the state's bytes, and how many tokens it stands for."""

    key: int
    size: int
    length: int


class Prefixes:
    """Which states are kept, the least recently used ones leaving first.

    Args:
        budget: bytes of states to keep; 0: none.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.size = budget, 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by the tokens' SHA-256

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """The key of the longest prefix of `ids` there is, and its length; ``(0, 0)`` if none."""
        tokens, digest, at, found = memoryview(array("q", ids).tobytes()), hashlib.sha256(), 0, None
        for length in sorted({e.length for e in self._entries.values() if e.length <= len(ids)}):
            digest.update(tokens[WIDTH * at : WIDTH * length])
            at, name = length, digest.digest()
            found = name if name in self._entries else found
        if found is None:
            return 0, 0
        self._entries.move_to_end(found)
        return self._entries[found].key, self._entries[found].length

    def put(self, ids: Sequence[int], key: int, size: int) -> list[int]:
        """Keep a state of `size` bytes; returns the keys of those to forget, `key` itself if it does not fit."""
        if not self.budget or size > self.budget:
            return [key]
        name = hashlib.sha256(array("q", ids).tobytes()).digest()
        if name in self._entries:
            return [key]
        self._entries[name] = Entry(key, size, len(ids))
        self.size += size
        gone = []
        while self.size > self.budget:
            entry = self._entries.popitem(last=False)[1]
            self.size -= entry.size
            gone.append(entry.key)
        return gone
