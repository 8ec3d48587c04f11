"""A compiled Triton kernel, launched without asking Triton how.

Importing this needs Triton: modules that launch kernels do, when they first run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, per cent."""

STREAM, FIRST = 3, 9
"""Where in a frame the stream stands, and where the kernel's own arguments begin."""


class Compiled:
    """A kernel compiled for one class of arguments (what ``kernel[grid](…)`` returned), and its constants."""

    def __init__(self, kernel: Any, constants: Sequence[Any]) -> None:
        self._kernel, self._constants = kernel, tuple(constants)
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def share(self) -> None:
        """Have multiprocessors set aside as much shared memory as they can while this kernel runs on them, though it
        needs little: one that needs much cannot start on a multiprocessor that is divided otherwise, until it is empty.
        A wish; a driver that does not know it changes nothing."""
        if torch.version.cuda is None:
            return
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuFuncSetAttribute(ctypes.c_void_p(self._function), PREFERRED_SHARED_MEMORY_CARVEOUT, 100)

    def frame(self, grid: tuple[int, int, int], args: Sequence[int | float]) -> list[Any]:
        """What `start` takes for addresses and sizes; the stream stands at `STREAM`, the first of them at `FIRST`."""
        return [*grid, 0, self._function, self._metadata, None, None, None, *args, *self._constants]

    def start(self, frame: list[Any]) -> None:
        """Launch it. Profilers' launch hooks are called as ever."""
        hook = knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):
            self._kernel[tuple(frame[:STREAM])](*frame[FIRST:], stream=frame[STREAM])
            return
        self._run(*frame)

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[int | float]) -> None:
        """Launch it on addresses and sizes."""
        frame = self.frame(grid, args)
        frame[STREAM] = stream
        self.start(frame)


def current_stream(device: int) -> int:
    """A CUDA device's current stream as launches take it."""
    return torch._C._cuda_getCurrentRawStream(device)
