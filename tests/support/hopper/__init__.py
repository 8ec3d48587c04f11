"""Kernels in CUDA C++ for Hopper, run on a CPU.

`hopper.cuh` beside this file has the names of ``ring_la/kernels/cuda/hopper.cuh``, the only file of the kernels with a
GPU's instructions in it, as functions of the host; `machine.hpp` runs a program's threads as fibers. The kernels' own
files are compiled as they are, by g++. This holds what a kernel computes, its barriers and its places in shared memory;
time, registers and the order of a GPU's memory are not modelled.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ring_la import kernels
from ring_la.kernels.runtime.cuda_kernel import CudaKernel

FOLDER = Path(__file__).parent
CUDA = Path(kernels.__file__).parent / "cuda"
MAIN = """
template <class Arguments> void call(void (*kernel)(Arguments), const void* arguments) {{
  kernel(*(const Arguments*)arguments);
}}
extern "C" int start(const void* arguments, int programs, int threads, int shared, int beside, unsigned seed,
                     int* to_zero, int count, char* said) {{
  machine::it().zeros = to_zero;
  machine::it().zeros_count = count;
  machine::it().early = to_zero;
  const std::string text = machine::run([=] {{ call({name}, arguments); }}, programs, threads, shared, beside, seed);
  snprintf(said, 4096, "%s", text.c_str());
  return !text.empty();
}}
"""


class KernelError(AssertionError):
    """A kernel stands still, leaves its shared memory, or its threads part where they must not."""


class Emulated:
    """A `CudaKernel` that runs here, `beside` programs at a time. `seed`: the threads' order; 0: by number."""

    def __init__(self, kernel: CudaKernel, beside: int = 2, seed: int = 0) -> None:
        self._kernel, self._beside, self._seed = kernel, beside, seed
        self._start = compiled(kernel)

    ZEROS: list[Tensor] = []
    """What `zeros` made and no launch has had."""

    @classmethod
    def zeros(cls, count: int, device: object) -> Tensor:
        """In place of `runtime.zeros.zeros`: they are ones until a thread of the launch behind waits for them."""
        cls.ZEROS.append(torch.ones(count, dtype=torch.int32))
        return cls.ZEROS[-1]

    def __call__(self, grid: int, *arguments: Tensor | int | float | None) -> None:
        flat = [x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments]
        packed = struct.pack("=" + self._kernel.arguments, *flat)
        said = ctypes.create_string_buffer(4096)
        of = self._kernel
        zeros = self.ZEROS.pop() if of.early else None
        how = grid, of.threads, of.shared, self._beside, ctypes.c_uint(self._seed)
        late = (ctypes.c_void_p(zeros.data_ptr()), zeros.numel()) if zeros is not None else (None, 0)
        if self._start(packed, *how, *late, said):
            raise KernelError(f"{of.file.name}: {said.value.decode()}")


@functools.cache
def folder() -> Path:
    """Where compiled kernels lie, for all processes and later runs: each by what it is made of."""
    shared = Path(tempfile.gettempdir()) / f"ring_la-hopper-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    return shared


@functools.cache
def sources() -> bytes:
    """All that kernels and this file's machine include."""
    files = (f for where in (FOLDER, CUDA, CUDA.parent / "wy") for f in where.iterdir() if f.is_file())
    return b"".join(f.name.encode() + f.read_bytes() for f in sorted(files))


@functools.cache
def compiled(kernel: CudaKernel):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    text = f'#include "{kernel.file}"\n' + MAIN.format(name=kernel.name)
    made_of = sources() + kernel.file.read_bytes() + f"{kernel.name} {kernel.defines}".encode()
    library = folder() / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:  # processes may share the folder: one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(kernel, text, library)
    return ctypes.CDLL(str(library)).start


def _compile(kernel: CudaKernel, text: str, library: Path) -> None:
    source, made = library.with_suffix(".cpp"), library.with_suffix(".part")
    source.write_text(text)
    how = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-include", FOLDER / "machine.hpp"]
    command = ["g++", *how, "-I", FOLDER, *(f"-D{d}" for d in kernel.defines), source, "-o", made]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(done.stderr[:4000])
    made.rename(library)
