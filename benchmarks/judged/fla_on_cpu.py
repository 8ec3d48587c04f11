"""FLA's context parallelism on CPUs: kernels by Triton's interpreter (``TRITON_INTERPRET=1``), gloo for messages."""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ring_la.testing import Call, Refused

from . import recurrences


class _Index(int):
    """A loop's index, which kernels cast; interpreted it is Python's int."""

    def to(self, dtype: object) -> _Index:
        return self


class _Gloo:
    """torch.distributed, whose `all_gather_into_tensor` takes FLA's shapes on gloo, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather_into_tensor(out: Tensor, x: Tensor, **keywords: Any) -> Any:
        return dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), **keywords)


@functools.cache
def _prepare() -> None:
    """Once a process: what FLA asks of a GPU is not asked."""
    for name in ("gated_delta_rule", "kda", "cp"):
        importlib.import_module(f"fla.ops.{name}")
    for module in [m for m in sys.modules.values() if hasattr(m, "_check_cp_device")]:
        module._check_cp_device = lambda device: None
    sys.modules["fla.ops.cp.comm"].dist = _Gloo()  # type: ignore[attr-defined]
    chunks: Any = sys.modules["fla.ops.common.chunk_delta_h"]
    chunks.range = lambda *of: map(_Index, builtins.range(*map(int, of)))


def run(call: Call, name: str) -> Tensor:
    """A function of `recurrences`, interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise Refused("FLA's kernels on a CPU want TRITON_INTERPRET=1")
    _prepare()
    return getattr(recurrences, name)(call)
