"""Launching a kernel again without asking Triton how.

Triton inspects every argument of every call, some 50 µs with the many arguments these kernels have. Here nothing can
differ between two calls of one class (the same constants and dtypes): tensors are aligned to 16 bytes and sizes are not
specialised. So what was compiled for a class is launched directly from the second call on, with addresses for tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import JITFunction

from ring_la.kernels.runtime.compiled import Compiled, current_stream

ALIGNMENT = 16


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous, on a 16-byte boundary and without its history; itself where it is so already."""
    x = (x.detach() if x.requires_grad else x).contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


class Beside:
    """A stream beside the current one, and the events that order the two."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._here, self._there = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Put it behind what the current stream has so far."""
        self._here.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._here)

    def join(self) -> None:
        """Put the current stream behind it."""
        self._there.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._there)


def bind() -> None:
    """Make the device's context current in this thread, once: the driver encodes tensor descriptors, and a thread
    of autograd may not have touched the device yet."""
    if torch.cuda.is_initialized() and torch.cuda.current_device() not in _bound.__dict__.setdefault("devices", set()):
        with _disable_current_modes():
            torch.empty(1, device="cuda").zero_()
        _bound.devices.add(torch.cuda.current_device())


class Interpreted:
    """A kernel under Triton's interpreter, which takes tensors."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        with _disable_current_modes():  # it copies tensors about
            self._kernel[grid](*args, **self._constants)


class Recorder(Protocol):
    """What wants to know of every launch."""

    def launched(
        self, how: Compiled | Interpreted, grid: tuple[int, int, int], args: Sequence[Any], beside: Beside | None
    ) -> None: ...

    def ordered(self, step: Callable[[], None]) -> None: ...


recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)
_compiled: dict[tuple, Compiled] = {}
_aside: ContextVar[Beside | None] = ContextVar("aside", default=None)
_bound = threading.local()


@contextmanager
def aside(beside: Beside | None) -> Iterator[None]:
    """Launches made here go to a stream beside the current one; what they use must last until `join`."""
    if beside is None:
        yield
        return
    order(beside.fork)
    token = _aside.set(beside)
    try:
        yield
    finally:
        _aside.reset(token)


def join(beside: Beside | None) -> None:
    """What follows on the current stream stands behind what was launched beside it."""
    if beside is not None:
        order(beside.join)


def order(step: Callable[[], None]) -> None:
    """Order streams, now and wherever this call is replayed."""
    step()
    recorder = recording.get()
    if recorder is not None:
        recorder.ordered(step)


def launch(kernel, grid: tuple[int, ...], *args, carveout: bool = False, **constants) -> None:
    """``kernel[grid](*args, **constants)`` on the tensors' device: tensors and sizes by position, constants by name.

    Sizes must be in the kernel's ``do_not_specialize``, tensors `aligned`. `carveout`: it shares multiprocessors with
    kernels that need much shared memory (`Compiled.share`).
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, carveout=carveout, **constants)
    grid, beside = (*grid, 1, 1)[:3], _aside.get()
    key = (kernel.__name__, device, *constants, *constants.values(), *[getattr(x, "dtype", None) for x in args])
    found = _compiled.get(key)
    if found is None and isinstance(kernel, JITFunction):
        rest = [constants[name] for name in kernel.arg_names[len(args) :]]
        with nullcontext() if beside is None else torch.cuda.stream(beside.stream):
            _compiled[key] = found = Compiled(kernel[grid](*args, **constants), rest)
        if carveout:
            found.share()
    elif isinstance(found, Compiled):
        stream = current_stream(device.index) if beside is None else beside.stream.cuda_stream
        found(grid, stream, [x.data_ptr() if isinstance(x, Tensor) else x for x in args])
    else:
        found = Interpreted(kernel, constants)
        found(grid, 0, args)
    recorder = recording.get()
    if recorder is not None:
        recorder.launched(found, grid, args, beside)
