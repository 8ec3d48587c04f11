"""Kernels in CUDA C++: compiled when first launched, by the NVRTC that torch brings, and kept on disk.

No nvcc and no headers of the toolkit: a kernel's file includes only files beside it or in ``kernels/cuda``. Compiling
takes a second or two; what was compiled for one source, architecture and NVRTC lies in Triton's cache and loads in
milliseconds. Launches go by the driver, with all arguments as one structure, and are recorded and replayed as those of
Triton are.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_la.kernels import gpu
from ring_la.kernels.runtime.observer import observing
from ring_la.kernels.runtime.streams import launching_on
from ring_la.kernels.runtime.triton_version import (
    FIRST,
    PREFERRED_SHARED_MEMORY_CARVEOUT,
    STREAM,
    current_stream,
    disk_cache,
)

SHARED_CODE = Path(__file__).parents[1] / "cuda"
"""Where headers that kernels of several rooms include lie."""

MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has called nothing of CUDA's runtime as yet, autograd's thread for one."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
BUFFER_POINTER, BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE: arguments as one structure."""


@dataclass(frozen=True)
class CudaKernel:
    """A ``__global__`` function that takes one structure.

    Attributes:
        file: its source. name: of the function, ``extern "C"``.
        arguments: the structure's fields as `struct` writes them, padding included.
        threads: of a program. shared: bytes of shared memory of one.
        defines: what the source is compiled with, ``NAME=value``.
        early: whether it begins before the launch before it has ended, and waits itself for what that writes. That one
            says when (`next_launch`) and was not early, so that all before it has ended.
    """

    file: Path
    name: str
    arguments: str
    threads: int
    shared: int
    defines: tuple[str, ...] = ()
    early: bool = False

    def __call__(self, grid: int, *arguments: Tensor | int | float | None) -> None:
        """Launch it on the first tensor's device: tensors by address (contiguous), None as null."""
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        with torch.cuda.device(device):
            loaded, stream = _loaded(self, device.index), launching_on.get()
            flat = [x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments]
            loaded(grid, current_stream(device.index) if stream is None else stream.cuda_stream, flat)
        observer = observing.get()
        if observer is not None:
            observer.launched(loaded, (grid, 1, 1), arguments, stream)


class ArgumentRoom:
    """Where the driver reads a launch's arguments; what they were is copied before the launch returns."""

    def __init__(self, kernel: CudaKernel, size: int) -> None:
        self.kernel = kernel
        self.buffer = ctypes.create_string_buffer(size)
        self._size = ctypes.c_size_t(size)
        self.extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(self.buffer), BUFFER_SIZE, ctypes.addressof(self._size), None
        )

    def launch(self, function: ctypes.c_void_p, grid: tuple[int, int, int], stream: int) -> int:
        """The driver's answer."""
        kernel = self.kernel
        return _launcher()(function, *grid, kernel.threads, 1, 1, kernel.shared, stream, None, self.extra)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class EarlyRoom(ArgumentRoom):
    """The same of a launch that begins early, and how it is launched."""

    def __init__(self, kernel: CudaKernel, size: int) -> None:
        super().__init__(kernel, size)
        self._attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        block = (ctypes.c_uint * 3)(kernel.threads, 1, 1)
        self.how = _Configuration((1, 1, 1), block, kernel.shared, None, ctypes.pointer(self._attribute), 1)
        self.at = ctypes.addressof(self.how)

    def launch(self, function: ctypes.c_void_p, grid: tuple[int, int, int], stream: int) -> int:
        self.how.grid[:] = grid
        self.how.stream = stream
        return _early_launcher()(self.at, function, None, self.extra)


class LoadedCudaKernel:
    """A kernel loaded on one device, launched as `CompiledKernel` is."""

    def __init__(self, kernel: CudaKernel, function: int, device: int) -> None:
        self._kernel, self._function, self._device = kernel, ctypes.c_void_p(function), device
        self._pack = struct.Struct("=" + kernel.arguments).pack_into
        self._size = struct.calcsize("=" + kernel.arguments)
        self._rooms: list[ArgumentRoom] = []  # that no launch uses now: threads launch side by side

    def encoding(self) -> tuple[LoadedCudaKernel, dict[int, Callable[[Any], list[Any]]]]:
        """It takes no tensor descriptors."""
        return self, {}

    def frame(self, grid: tuple[int, int, int], args: Sequence[Any]) -> list[Any]:
        """What `start` takes: arguments from `FIRST` on, the stream at `STREAM`."""
        return [*grid, *[None] * (FIRST - STREAM), *args]

    def start(self, frame: list[Any]) -> None:
        self._launch(*frame[: STREAM + 1], *frame[FIRST:])

    def direct(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """As `CompiledKernel.direct`."""
        return self._launch, ()

    def _launch(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        early = self._kernel.early
        try:
            room = self._rooms.pop()
        except IndexError:
            room = (EarlyRoom if early else ArgumentRoom)(self._kernel, self._size)
        self._pack(room.buffer, 0, *arguments)
        code = room.launch(self._function, (x, y, z), stream)
        if code == INVALID_CONTEXT:
            _make_current(self._device)
            code = room.launch(self._function, (x, y, z), stream)
        self._rooms.append(room)
        if code:
            _check("cuLaunchKernelEx" if early else "cuLaunchKernel", code)

    def __call__(self, grid: int, stream: int, args: Sequence[Any]) -> None:
        frame = self.frame((grid, 1, 1), args)
        frame[STREAM] = stream
        self.start(frame)


@functools.cache
def unsupported() -> str:
    """Why kernels in CUDA C++ cannot be compiled here, or an empty string."""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    return "" if nvrtc_file() else "the NVRTC library, which torch's CUDA packages bring, is not there"


@functools.cache
def nvrtc_file() -> str:
    """Where NVRTC is: among the packages beside torch, or the system's; an empty string if nowhere."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(glob.glob(f"{folder}/*/lib/{name}*"))
        if found:
            return found[0]
    try:
        ctypes.CDLL(name)
    except OSError:
        return ""
    return name


# -- compiling -------------------------------------------------------------------------------------------------


def compiled(kernel: CudaKernel, architecture: str) -> bytes:
    """The machine code of a kernel for an architecture (sm_90a), from disk if it was compiled before.

    Raises:
        RuntimeError: NVRTC refuses it; its words.
    """
    source, headers, options = _given(kernel, architecture)
    key = "\0".join([source, *headers.values(), *options, _nvrtc_version()])
    cache, name = disk_cache(hashlib.sha256(key.encode()).hexdigest()), f"{kernel.name}.cubin"
    known = cache.get_file(name)
    if known is not None:
        return Path(known).read_bytes()
    code, _ = _compile(kernel.file.name, source, headers, options)
    cache.put(code, name, binary=True)
    return code


def build(kernel: CudaKernel, architecture: str, *options: str) -> tuple[bytes, str]:
    """The machine code of a kernel, compiled anew, and what NVRTC says of it; `options`: more of its options.

    Raises:
        RuntimeError: NVRTC refuses it; its words.
    """
    return _compile(kernel.file.name, *_given(kernel, architecture, *options))


def _given(kernel: CudaKernel, architecture: str, *more: str) -> tuple[str, dict[str, str], list[str]]:
    """A kernel's source, its headers, and what it is compiled with."""
    options = [f"--gpu-architecture={architecture}", "-default-device", *(f"-D{d}" for d in kernel.defines), *more]
    return kernel.file.read_text(), _headers(kernel.file), options


def _headers(file: Path) -> dict[str, str]:
    """The files a source includes, by name, and those they include."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        for name in re.findall(r'^#include "(.+)"', waiting.pop().read_text(), re.MULTILINE):
            if name not in found:
                path = next(p for p in (file.parent / name, SHARED_CODE / name) if p.exists())
                found[name] = path.read_text()
                waiting.append(path)
    return found


def _compile(name: str, source: str, headers: dict[str, str], options: Sequence[str]) -> tuple[bytes, str]:
    library, program = _nvrtc(), ctypes.c_void_p()

    def strings(texts: Sequence[str]) -> ctypes.Array:
        return (ctypes.c_char_p * len(texts))(*(t.encode() for t in texts))

    def text(size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, size_of)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, get)(program, buffer)
        return buffer.raw

    bodies, names = strings([*headers.values()]), strings([*headers])
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), bodies, names)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), strings(options))
        log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
        if failed:
            raise RuntimeError(f"NVRTC cannot compile {name} with {' '.join(options)}:\n{log}")
        return text("nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for part in glob.glob(
        f"{os.path.dirname(nvrtc_file()) or '.'}/libnvrtc-builtins.so.*"
    ):  # which it looks for by name
        ctypes.CDLL(part, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(nvrtc_file())


def _nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value} {os.path.basename(nvrtc_file())}"


# -- the driver ------------------------------------------------------------------------------------------------


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    """cuLaunchKernel."""
    launch = _driver().cuLaunchKernel
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    launch.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return launch


@functools.cache
def _early_launcher() -> Any:
    """cuLaunchKernelEx."""
    launch = _driver().cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch


def _make_current(device: int) -> None:
    """The context that CUDA's runtime has on a device, in this thread."""
    context = ctypes.c_void_p()
    _check("cuDevicePrimaryCtxRetain", _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", _driver().cuCtxSetCurrent(context))


@functools.cache
def _loaded(kernel: CudaKernel, device: int) -> LoadedCudaKernel:
    """The kernel on the current device. Its module is never unloaded."""
    major, minor = gpu.capability(torch.device("cuda", device))
    code = compiled(kernel, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    torch.cuda.current_blas_handle()  # the device's context is there, and current in this thread
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), code))
    _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()))
    for attribute, value in (
        (MAX_DYNAMIC_SHARED_SIZE, kernel.shared), (PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):  # fmt: skip
        _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, value))
    return LoadedCudaKernel(kernel, function.value, device)


def _check(call: str, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(name))
        raise RuntimeError(f"{call}: {(name.value or b'error').decode()} ({code})")
