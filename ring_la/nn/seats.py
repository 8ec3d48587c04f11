"""Which of the sequences that are decoded side by side share memory for their keys, and how much of it there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALONE = 4096
"""Tokens from which a sequence has memory of its own: reading them takes longer than the launches it costs."""
SMALLEST = 256
"""Tokens there is room for at least."""


class Seat(NamedTuple):
    """Sequences that share a tensor, and the tokens there is room for in each of its rows."""

    rows: tuple[int, ...]
    capacity: int


class Seats:
    """How many tokens each sequence of a batch has, and where its keys are: one for all layers of a model.

    Attributes:
        lengths: tokens of each sequence, on the host. length: the same on the device, int64 ``[N]``.
        seats: the tensors. order: for the results of all seats, one after the other, the place of each sequence; None:
            they are in order.
        index: the sequences of each seat, on the device. here: their rows of its tensor.
    """

    def __init__(self, lengths: list[int], seats: list[Seat], device: torch.device) -> None:
        self.lengths, self.seats, self.device = lengths, seats, device
        self.length = torch.tensor(lengths, dtype=torch.int64, device=device)
        placed = [row for seat in seats for row in seat.rows]
        ordered = placed == sorted(placed)
        self.order = None if ordered else torch.tensor(placed, device=device).argsort()
        self.index = [torch.tensor(seat.rows, device=device) for seat in seats]
        self.here = [torch.arange(len(seat.rows), device=device) for seat in seats]
        self._masks: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, room: Sequence[int] = ()) -> Seats:
        """Seats for sequences of these lengths; `room`: tokens there is room for already where one sits alone, or 0."""
        together: dict[int, list[int]] = {}
        alone = []
        for row, length in enumerate(lengths):
            if length < ALONE:
                together.setdefault(max(SMALLEST, 1 << length.bit_length()), []).append(row)
            else:
                had = room[row] if row < len(room) else 0
                alone.append(Seat((row,), had if had > length else length + length // 8 + SMALLEST))
        return cls(list(lengths), [Seat(tuple(rows), n) for n, rows in sorted(together.items())] + alone, device)

    @property
    def room(self) -> list[int]:
        """Tokens there is room for where a sequence sits alone, else 0."""
        room = [0] * len(self.lengths)
        for seat in self.seats:
            if len(seat.rows) == 1:
                room[seat.rows[0]] = seat.capacity
        return room

    @property
    def full(self) -> bool:
        """Whether a sequence has no room for its next token."""
        return any(self.lengths[row] >= seat.capacity for seat in self.seats for row in seat.rows)

    def advance(self) -> None:
        """Every sequence has a token more."""
        self.lengths = [n + 1 for n in self.lengths]
        self.length += 1
        self._masks.clear()

    def moved(self, rows: Sequence[int], more: Sequence[int]) -> Seats:
        """Seats for some of the sequences, in this order, and for new ones of `more` tokens."""
        room = self.room
        return Seats.of([*(self.lengths[r] for r in rows), *more], self.device, [room[r] for r in rows])

    def mask(self, i: int, begin: int, end: int, window: int) -> Tensor | None:
        """Which columns from `begin` to `end` the next tokens of seat `i` see ``[n, 1, 1, ·]``; None: all of them."""
        if len(self.seats[i].rows) == 1:
            return None
        key = (i, window)
        if key not in self._masks:
            distance = self.length[self.index[i], None] - torch.arange(begin, end, device=self.device)
            seen = (distance >= 0) & (distance <= (window if window >= 0 else end))
            self._masks[key] = seen[:, None, None]
        return self._masks[key]
