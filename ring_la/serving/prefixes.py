"""Prompts that were read before, so that one which begins alike is read from there.

What a model remembers of a prompt is a state of every layer: a few MB for recurrences, whatever the prompt's length,
and the keys and values of attention. A state stands for one prefix and cannot be cut back, so one is kept for every
piece of a prompt that was read at once: at its end, where the next turn of a conversation goes on, and at multiples of
the piece's length, where prompts with the same beginning part.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """The number of a prefix's state, and the state's bytes."""

    key: int
    size: int


class Prefixes:
    """Which states are kept, the least recently used ones leaving first.

    Args:
        budget: bytes of states to keep; 0: none.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.size = budget, 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by the tokens, int32

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """The key of the longest prefix of `ids` there is, and its length; ``(0, 0)`` if none."""
        tokens = _packed(ids)
        found = max((e for e in self._entries if tokens.startswith(e)), key=len, default=None)
        if found is None:
            return 0, 0
        self._entries.move_to_end(found)
        return self._entries[found].key, len(found) // 4

    def put(self, ids: Sequence[int], key: int, size: int) -> list[int]:
        """Keep a state of `size` bytes; returns the keys of those to forget, `key` itself if it does not fit."""
        tokens = _packed(ids)
        if not self.budget or size > self.budget or tokens in self._entries:
            return [key]
        self._entries[tokens] = Entry(key, size)
        self.size += size
        gone = []
        while self.size > self.budget:
            entry = self._entries.popitem(last=False)[1]
            self.size -= entry.size
            gone.append(entry.key)
        return gone


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
