"""A compiled Triton kernel, launched without asking Triton how.

Importing this needs Triton: modules that launch kernels do, when they first run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, per cent."""


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

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[int | float]) -> None:
        """Launch it on addresses and sizes. Profilers' launch hooks are called as ever."""
        hook = knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):
            self._kernel[grid](*args, *self._constants, stream=stream)
            return
        self._run(*grid, stream, self._function, self._metadata, None, None, None, *args, *self._constants)


def current_stream(device: torch.device) -> int:
    """A CUDA device's current stream as launches take it."""
    return driver.active.get_current_stream(device.index)
