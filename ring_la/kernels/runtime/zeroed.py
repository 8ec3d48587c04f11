"""Memory set to zero by the driver: a launch like any other to what records and replays them, where `torch.zeros` is an
operation of its own with an allocation of its own, twice to three times the host's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_la.kernels.runtime.cuda_kernel import check_code, driver
from ring_la.kernels.runtime.observer import observing
from ring_la.kernels.runtime.streams import launching_on
from ring_la.kernels.runtime.triton_version import FIRST, STREAM, current_stream


class Zeroing:
    """What sets bytes at an address to zero, launched as `CompiledKernel` is."""

    def encoding(self) -> tuple[Zeroing, dict[int, Callable[[Any], list[Any]]]]:
        """It takes no tensor descriptors."""
        return self, {}

    def frame(self, grid: tuple[int, int, int], args: Sequence[Any]) -> list[Any]:
        """What `start` takes: the address and how many bytes from `FIRST` on, the stream at `STREAM`."""
        return [*grid, *[None] * (FIRST - STREAM), *args]

    def start(self, frame: list[Any]) -> None:
        self._set(*frame[: STREAM + 1], *frame[FIRST:])

    def direct(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """As `CompiledKernel.direct`."""
        return self._set, ()

    def _set(self, x: int, y: int, z: int, stream: int, address: int, size: int) -> None:
        code = driver().cuMemsetD8Async(address, 0, size, stream)
        if code:
            check_code("cuMemsetD8Async", code)


ZEROING = Zeroing()


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros` on an NVIDIA GPU, within the host code of kernels."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if not made.is_cuda:
        return made.zero_()
    size, stream = math.prod(shape) * dtype.itemsize, launching_on.get()
    with torch.cuda.device(device):
        at = current_stream(made.device.index) if stream is None else stream.cuda_stream
        ZEROING.start([1, 1, 1, at, *[None] * (FIRST - STREAM - 1), made.data_ptr(), size])
    observer = observing.get()
    if observer is not None:
        observer.launched(ZEROING, (1, 1, 1), (made, size), stream)
    return made
