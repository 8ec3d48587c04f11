"""Where the rooms of a mailbox stand, and tensors that look into them: found once for a memory, shapes and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .job import KeyValues


class Addresses(NamedTuple):
    """First bytes, for each rank: of its inbox, and of the room of each of its rounds."""

    inboxes: list[int]
    rooms: list[list[int]]


class Delivery(NamedTuple):
    """Rows ``start … stop − 1`` of this rank's keys and values, and where they go."""

    k: Tensor
    v: Tensor
    start: int
    stop: int


@dataclass
class Views:
    """Tensors in a memory.

    Attributes:
        deliveries: by steps to the right, what goes to which rank.
        rooms: this rank's, by round. inboxes: for keys and for values, by owner and the gradients' dtype.
    """

    deliveries: dict[range, list[tuple[int, list[Delivery]]]] = field(default_factory=dict)
    rooms: dict[int, KeyValues] = field(default_factory=dict)
    inboxes: dict[tuple[int, torch.dtype | None], Sequence[Tensor]] = field(default_factory=dict)
