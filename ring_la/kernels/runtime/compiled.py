"""A compiled Triton kernel, launched without asking Triton how.

Importing this needs Triton: modules that launch kernels do, when they first run.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, per cent."""

STREAM, FIRST = 3, 9
"""Where in a frame the stream stands, and where the kernel's own arguments begin."""


UNWRAPPED = "tensordesc_indices", "tensordesc_meta", "launcher"
"""What Triton's launcher knows of descriptors (3.5 to 3.7): which arguments they are, how each is encoded, and what
launches without encoding."""


class Compiled:
    """A kernel compiled for one class of arguments (what ``kernel[grid](…)`` returned), and its constants."""

    def __init__(self, kernel: Any, constants: Sequence[Any]) -> None:
        self._kernel, self._constants = kernel, tuple(constants)
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def encoding(self) -> tuple[Compiled, dict[int, Callable[[Any], list[Any]]]]:
        """For frames in which tensor descriptors stand encoded, which Triton's launcher does before every launch: the
        kernel that takes them, and by argument what makes of a descriptor its map, sizes and strides. The kernel
        itself and nothing where this version of Triton keeps to itself how it does that."""
        wrapped = getattr(self._run, "launch", None)
        known = inspect.getclosurevars(wrapped) if inspect.isfunction(wrapped) else None
        encode = known and known.globals.get("make_tensordesc_arg")
        places, how, launcher = (known and known.nonlocals.get(name) for name in UNWRAPPED)
        if not (encode and places and how and launcher) or None in how:
            return self, {}
        bare = copy.copy(self)
        bare._run = copy.copy(self._run)
        bare._run.launch = launcher
        return bare, {i: functools.partial(encode, metadata=one) for i, one in zip(sorted(places), how)}

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
            metadata = self._kernel.launch_metadata(tuple(frame[:STREAM]), frame[STREAM], *frame[FIRST:])
            frame[FIRST - 3 : FIRST] = metadata, hook, knobs.runtime.launch_exit_hook
        self._run(*frame)

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[int | float]) -> None:
        """Launch it on addresses and sizes."""
        frame = self.frame(grid, args)
        frame[STREAM] = stream
        self.start(frame)


def current_stream(device: int) -> int:
    """A CUDA device's current stream as launches take it."""
    return torch._C._cuda_getCurrentRawStream(device)
