"""Heads for tokens through memory that every rank of a host reaches: each rank writes its rows of each other's heads to
where they belong there, says so, and waits for those of the others. Nothing is put together before or behind it but for
the copy out of the room, which the next exchange uses again.

A row of a head is contiguous and is written as words of 16 bytes where it can be, by PyTorch's own copies.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...comm import Group
from ...comm.memory import Memory

WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""Dtypes to copy in, the widest first."""
MOST = 8
"""Stretches of rows of a rank that are written one by one; more go by messages."""

Shape = tuple[int, ...]


class Landing(NamedTuple):
    """Rows ``start … stop − 1`` of a rank's, which stand from `place` on among those of all ranks."""

    start: int
    stop: int
    place: int

    @property
    def here(self) -> slice:
        """Among the rank's rows."""
        return slice(self.start, self.stop)

    @property
    def there(self) -> slice:
        """Among those of all ranks."""
        return slice(self.place, self.place + self.stop - self.start)


class Write(NamedTuple):
    """What goes to one rank: into some rows and heads of a tensor there, by its number."""

    tensor: int
    rows: slice
    heads: slice
    source: Tensor


_known: MutableMapping[Tensor, dict[tuple[int, ...], list[list[Landing]]]] = WeakIdKeyDictionary()


def stretches(tokens: Sequence[int], order: Tensor | None) -> list[list[Landing]]:
    """For each rank, where its rows stand after the exchange; `order` is the row each row comes from. Read from the
    device once."""
    sizes = tuple(tokens)
    if order is None:
        return [[Landing(0, n, sum(sizes[:r]))] if n else [] for r, n in enumerate(sizes)]
    known = _known.setdefault(order, {})
    if sizes not in known:
        places = torch.empty_like(order, device="cpu")
        places[order.cpu()] = torch.arange(len(order), device="cpu")
        known[sizes] = [_runs(x) for x in places.split(list(sizes))]
    return known[sizes]


def _runs(places: Tensor) -> list[Landing]:
    """Where places follow each other."""
    if not len(places):
        return []
    cuts = [0, *places.diff().ne(1).nonzero().flatten().add(1).tolist(), len(places)]
    return [Landing(a, b, int(places[a])) for a, b in pairwise(cuts)]


class Rooms:
    """The tensors of every rank in memory that all reach, found once for their shapes.

    Args:
        shapes: for each rank, those of its tensors.
    """

    def __init__(self, group: Group, shapes: Sequence[Sequence[Shape]], dtypes: Sequence[torch.dtype]) -> None:
        self.group, self.shapes, self.dtypes = group, shapes, dtypes
        self.places = [_places(of_rank, dtypes) for of_rank in shapes]
        self._found: WeakKeyDictionary[Memory, list[list[Tensor]]] = WeakKeyDictionary()

    def exchange(self, writes: Sequence[Sequence[Write]]) -> list[Tensor]:
        """The tensors that all ranks have written for this one; `writes` is what it writes to each. Collective."""
        memory, me = self.group.memory.of(max(p[-1] for p in self.places)), self.group.rank
        if memory not in self._found:
            self._found[memory] = [self._of(memory, rank) for rank in range(self.group.size)]
        rooms = self._found[memory]
        for n in range(1, self.group.size + 1):
            rank = (me + n) % self.group.size
            for w in writes[rank]:
                _copy(rooms[rank][w.tensor][:, w.rows, w.heads], w.source)
            if rank != me:
                memory.tell(rank)
        memory.arrived((1 << self.group.size) - 1 - (1 << me), 0, self.places[me][-1])
        out = [room.clone() for room in rooms[me]]
        memory.meet()
        return out

    def _of(self, memory: Memory, rank: int) -> list[Tensor]:
        parts = zip(self.places[rank], self.shapes[rank], self.dtypes)
        return [memory.rooms(rank, at, (shape,), dtype)[0] for at, shape, dtype in parts]


def _places(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[int]:
    """The first byte of each tensor, and the end."""
    out = [0]
    for shape, dtype in zip(shapes, dtypes):
        out.append(out[-1] + -(-prod(shape) * dtype.itemsize // 256) * 256)
    return out


def _copy(into: Tensor, source: Tensor) -> None:
    if not source.numel():
        return
    for word in WORDS:
        if all(_holds(x, word) for x in (into, source)):
            into, source = into.view(word), source.view(word)
            break
    into.copy_(source, non_blocking=True)


def _holds(x: Tensor, word: torch.dtype) -> bool:
    """Whether the rows of `x` are whole words."""
    ratio, rest = divmod(word.itemsize, x.element_size())
    if ratio < 2 or rest or x.stride(-1) != 1 or x.data_ptr() % word.itemsize:
        return False
    return not any(n % ratio for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
