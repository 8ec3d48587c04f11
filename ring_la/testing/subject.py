"""What is judged, and what one rank of it is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_above_zero, check_flag, check_int
from ..errors import ArgumentError, RingLAError
from ..layout import KINDS
from .operations import OPERATIONS, find
from .split import Order

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest relative error of a head of a rank's tensor, unless the subject says otherwise."""


@dataclass(frozen=True)
class Call:
    """What one rank is given.

    Attributes:
        rank, size, group, device: this rank, their number, their process group (the default group), its device.
        kind: how the tokens are split: one of the subject's `kinds`.
        tensors: this rank's inputs by name, leaves that want gradients: tokens ``[B, T_local, …]``; shared ones and
            `initial_state` ``[N, …]`` (where the case has one) whole.
        seq_len: tokens of the whole sequence.
        cu_seqlens: offsets ``[N+1]`` of documents in the whole sequence; None: an unpacked batch.
        options: keywords of the operation, as the reference takes them.
        output_final_state: whether the case asks for final states.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device
    kind: str | Order
    tensors: dict[str, Tensor]
    seq_len: int
    cu_seqlens: tuple[int, ...] | None
    options: dict[str, Any]
    output_final_state: bool


class Refused(RingLAError, NotImplementedError):
    """Raised by a `Subject`'s function, on every rank and before anything is sent, for a case that it is not meant for.
    Any other error costs a new start of the ranks, as messages may be under way."""


Run = Callable[[Call], Any]
"""Runs a rank's part: gives ``o [B, T_local, …]``, or ``(o, final_state)``, or a tuple with fields of these names."""


@dataclass(frozen=True)
class Subject:
    """An implementation of a split operation, whosever it is.

    Args:
        run: an importable function that runs one rank's part.
        operation: what it claims to compute: a name of `ring_la.reference` (see OPERATIONS).
        kinds: how it shards: names of layouts, or functions from (seq_len, size, cu_seqlens) to each rank's tokens.
        options: keywords of the operation to try, a mapping each.
        dtype: of the inputs. tolerance: the largest relative error; None: TOLERANCE of the dtype.
        states: whether it takes `initial_state` and gives `final_state`, alike on every rank.
        shared_gradients: what a rank's gradient of an input that ranks share is: its "part", which the ranks add up
            outside, or the "whole".
        heads, key_dim, value_dim, tokens: sizes; `tokens` is rounded to what the ranks divide.
        unit: tokens a rank that lengths of documents are multiples of, in all cases but the uneven ones.

    Raises:
        ArgumentError: naming the argument.
    """

    run: Run
    operation: str
    kinds: tuple[str | Order, ...] = ("contiguous",)
    options: tuple[Mapping[str, Any], ...] = field(default=({},))
    dtype: torch.dtype = torch.float64
    tolerance: float | None = None
    states: bool = True
    shared_gradients: Literal["part", "whole"] = "part"
    heads: int = 4
    key_dim: int = 6
    value_dim: int = 5
    tokens: int = 48
    unit: int = 1

    def __post_init__(self) -> None:
        find(self.operation)
        for name in ("heads", "key_dim", "value_dim", "tokens", "unit"):
            check_int(name, getattr(self, name), 1)
        check_flag("states", self.states)
        if self.tolerance is not None:
            check_above_zero("tolerance", self.tolerance)
        if not isinstance(self.options, (tuple, list)) or not all(isinstance(o, Mapping) for o in self.options):
            raise ArgumentError("options", "a tuple of mappings of keywords", repr(self.options))
        if self.dtype not in [*TOLERANCE]:
            raise ArgumentError("dtype", f"one of {', '.join(map(str, TOLERANCE))}", self.dtype)
        if self.shared_gradients not in ("part", "whole"):
            raise ArgumentError("shared_gradients", '"part" or "whole"', repr(self.shared_gradients))
        if self.heads % 2:
            raise ArgumentError("heads", "an even number, since groups of two are tried", self.heads)
        several = isinstance(self.kinds, (tuple, list))
        if several and not self.kinds:
            raise ArgumentError("kinds", "at least one way to split", self.kinds)
        for kind in self.kinds if several else [self.kinds]:
            if not several or not (callable(kind) or kind in KINDS):
                raise ArgumentError(
                    "kinds", f"a tuple of names out of {', '.join(KINDS)}, or functions", repr(self.kinds)
                )
        if not callable(self.run):
            raise ArgumentError("run", "a function of a Call", repr(self.run))

    @property
    def bound(self) -> float:
        """The largest relative error that is right."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance

    @property
    def has_states(self) -> bool:
        """Whether initial and final states are judged."""
        return self.states and OPERATIONS[self.operation].state is not None

    @property
    def name(self) -> str:
        """Its function, by module."""
        run = getattr(self.run, "func", self.run)  # a functools.partial's
        return f"{run.__module__}.{run.__qualname__}"


def name_of(kind: str | Order) -> str:
    """A way to split, in a word."""
    return kind if isinstance(kind, str) else kind.__name__
