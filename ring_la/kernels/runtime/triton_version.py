"""What ring_la knows of Triton beyond its language: how it launches, what it specialises on, and its versions.

Proven on 3.5 to 3.7. No other file asks for a version of Triton or reads what it keeps to itself. Importing this needs
Triton: modules that launch kernels do, when they first run.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import JITFunction, knobs
from triton.runtime.cache import get_cache_manager
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16
"""Bytes: of a tensor on such a boundary Triton's compiler makes wide loads."""

NARROW = 2**31
"""Sizes below it, and above its negative, are passed as 32 bits; others as 64."""

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, per cent."""

STREAM, FIRST = 3, 9
"""Where in a launcher's frame the stream stands, and where the kernel's own arguments begin."""

OF_LAUNCHERS = (
    "launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size",
)  # fmt: skip
"""What Triton's launcher (3.5, 3.6) hands on to the one compiled for a kernel."""

UNWRAPPED = "tensordesc_indices", "tensordesc_meta", "launcher"
"""What Triton's launcher knows of descriptors (3.5 to 3.7): which arguments they are, how each is encoded, and what
launches without encoding."""


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, and so takes tensors of the CPU."""
    return bool(knobs.runtime.interpret)


def compiles(kernel: Any) -> bool:
    """Whether a kernel is compiled; else the interpreter runs it."""
    return isinstance(kernel, JITFunction)


def gluon_is_proven() -> bool:
    """Whether this is a version of Triton that our kernels in Gluon, which differs between versions, are proven on."""
    return triton.__version__.startswith("3.6.")


# -- what kernels are compiled for -----------------------------------------------------------------------------


def unspecialised(kernel: Any) -> tuple[bool, ...]:
    """For each parameter whether a kernel is compiled for all its values (`do_not_specialize`)."""
    names = kernel.do_not_specialize if compiles(kernel) else kernel.kwargs.get("do_not_specialize")
    return tuple(i in (names or ()) or name in (names or ()) for i, name in enumerate(kernel.arg_names))


def class_of_size(n: int, unspecialised: bool) -> Hashable:
    """What Triton specialises on in an int: its width and, where it may, whether it is 1 or a multiple of 16."""
    narrow = -NARROW <= n < NARROW
    return narrow if unspecialised else (narrow, 1 if n == 1 else 16 if n % 16 == 0 else 0)


def class_of(x: Any, unspecialised: bool) -> Hashable:
    """What Triton tells arguments apart by: two of one class run the same kernel."""
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() % ALIGNMENT == 0 else (x.dtype, "off a boundary")
    if type(x) is int:
        return class_of_size(x, unspecialised)
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, tuple(x.block_shape)
    if isinstance(x, tuple):
        return tuple(class_of(y, False) for y in x)  # Triton looks into tuples whatever it is told
    return type(x)  # type: ignore[return-value]


# -- tensor descriptors ----------------------------------------------------------------------------------------


class DescribedMemory:
    """A tensor descriptor as Triton's launcher reads it, of memory that no tensor need stand for."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        bind_device()
        self.base, self.shape, self.strides = self, shape, strides
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Bound(threading.local):
    """The devices whose contexts this thread has made current."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


def bind_device() -> None:
    """Make the device's context current in this thread, once: the driver encodes tensor descriptors, and a thread
    of autograd may not have touched the device yet."""
    if torch.cuda.is_initialized() and torch.cuda.current_device() not in _bound.devices:
        with _disable_current_modes():
            torch.empty(1, device="cuda").zero_()
        _bound.devices.add(torch.cuda.current_device())


# -- launching -------------------------------------------------------------------------------------------------


class InterpretedKernel:
    """A kernel under Triton's interpreter, which takes tensors."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        with _disable_current_modes():  # it copies tensors about
            self._kernel[grid](*args, **self._constants)


class CompiledKernel:
    """A kernel compiled for one class of arguments (what ``kernel[grid](…)`` returned), and its constants; launched
    without asking Triton how."""

    def __init__(self, kernel: Any, constants: Sequence[Any]) -> None:
        self._kernel, self._constants = kernel, tuple(constants)
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def encoding(self) -> tuple[CompiledKernel, dict[int, Callable[[Any], list[Any]]]]:
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

    def prefer_shared_memory(self) -> None:
        """Have multiprocessors set aside as much shared memory as they can while this kernel runs on them, though it
        needs little: one that needs much cannot start on a multiprocessor that is divided otherwise, until it is empty.
        A wish; a driver that does not know it changes nothing."""
        if torch.version.cuda is None:
            return
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuFuncSetAttribute(ctypes.c_void_p(self._function), PREFERRED_SHARED_MEMORY_CARVEOUT, 100)

    def frame(self, grid: tuple[int, int, int], args: Sequence[Any]) -> list[Any]:
        """What `start` takes for addresses and sizes; the stream stands at `STREAM`, the first of them at `FIRST`."""
        return [*grid, 0, self._function, self._metadata, None, None, None, *args, *self._constants]

    def start(self, frame: list[Any]) -> None:
        """Launch it. Profilers' launch hooks are called as ever."""
        if watched():
            metadata = self._kernel.launch_metadata(tuple(frame[:STREAM]), frame[STREAM], *frame[FIRST:])
            frame[FIRST - 3 : FIRST] = metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self._run(*frame)

    def direct(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What launches it on (grid, stream, the second of these, what stands from `FIRST` on in a frame), where nobody
        watches (`watched`). In Triton 3.5 and 3.6, of kernels without scratch memory, that is the launcher compiled
        for the kernel; elsewhere what stands before it."""
        run = self._run
        known = triton.__version__.startswith(("3.5.", "3.6.")) and all(hasattr(run, name) for name in OF_LAUNCHERS)
        if not known or run.global_scratch_size or run.profile_scratch_size:
            return run, (self._function, self._metadata, None, None, None)
        flags = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (self._function, *flags, None, None, self._metadata, None, None, None)

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        """Launch it on addresses and sizes."""
        frame = self.frame(grid, args)
        frame[STREAM] = stream
        self.start(frame)


def watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def current_stream(device: int) -> int:
    """A CUDA device's current stream as launches take it."""
    return torch._C._cuda_getCurrentRawStream(device)


def disk_cache(key: str) -> Any:
    """Triton's folder of compiled kernels for a key: ``get_file(name)``, a path or None, and ``put(data, name)``."""
    return get_cache_manager(key)
