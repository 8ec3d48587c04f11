"""What a caller of `parallelize` chose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...checks import check_flag
from ...choices import SoftmaxBackend
from ...context import ContextParallel
from ...errors import ArgumentError
from ...softmax.backends import BACKENDS
from ...softmax.wire import COMM_DTYPES


@dataclass(frozen=True)
class Settings:
    """The arguments of `parallelize`, which says what they mean.

    Raises:
        ArgumentError: naming the argument.
    """

    cp: ContextParallel
    kind: str
    average: bool
    loss_chunk: int | None
    check: bool
    backend: SoftmaxBackend | None = None
    kv_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cp, ContextParallel):
            raise ArgumentError("cp", "a ContextParallel", type(self.cp).__name__)
        for name, flag in (("average", self.average), ("check", self.check)):
            check_flag(name, flag)
        if self.kind not in ("zigzag", "contiguous"):
            raise ArgumentError("kind", "zigzag or contiguous", repr(self.kind))
        if self.loss_chunk is not None and (not isinstance(self.loss_chunk, int) or self.loss_chunk < 1):
            raise ArgumentError("loss_chunk", "an int ≥ 1 or None", repr(self.loss_chunk))
        if self.backend not in (None, *BACKENDS):
            raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}", repr(self.backend))
        if self.kv_comm_dtype not in (None, *COMM_DTYPES):
            expected = f"None or one of {', '.join(map(str, COMM_DTYPES))}"
            raise ArgumentError("kv_comm_dtype", expected, repr(self.kv_comm_dtype))

    @cached_property
    def of_attention(self) -> dict[str, Any]:
        """The keywords of split softmax attention."""
        chosen = dict(backend=self.backend, kv_comm_dtype=self.kv_comm_dtype)
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def scale(self) -> int:
        """What gradients of a call's results are multiplied by."""
        return self.cp.size if self.average else 1
