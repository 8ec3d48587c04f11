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
                     const machine::Late* late, int count, char* said) {{
  machine::it().late_writes.assign(late, late + count);
  machine::it().early = count;
  const std::string text = machine::run([=] {{ call({name}, arguments); }}, programs, threads, shared, beside, seed);
  machine::write_late();
  snprintf(said, 4096, "%s", text.c_str());
  return !text.empty();
}}
"""


class KernelError(AssertionError):
    """A kernel stands still, leaves its shared memory, or its threads part where they must not."""


class Emulated:
    """A `CudaKernel` that runs here, `BESIDE` programs at a time. `seed`: the threads' order; 0: by number."""

    BESIDE = 2

    def __init__(self, kernel: CudaKernel, seed: int = 0) -> None:
        self._kernel, self._seed = kernel, seed
        self._start = compiled(kernel)

    LATE: list[tuple[Tensor, Tensor]] = []
    """What the launch before will have written, and where, once a thread of the next one, if that is early, waits."""

    @classmethod
    def zeros(cls, count: int, device: object) -> Tensor:
        """In place of `runtime.zeros.zeros`."""
        return cls.clear(torch.empty(count, dtype=torch.int32))

    @classmethod
    def clear(cls, x: Tensor) -> Tensor:
        """In place of `runtime.zeros.clear`: they are ones until then."""
        cls.LATE.append((x, torch.zeros_like(x)))
        return x.fill_(1)

    @classmethod
    def late(cls, x: Tensor) -> None:
        """What the last launch has written to `x` is there then, and all its bits are set until then."""
        cls.LATE.append((x, x.clone()))
        x.view(torch.uint8).fill_(0xFF)

    def __call__(self, grid: int, *arguments: Tensor | int | float | None) -> None:
        flat = [x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments]
        packed = struct.pack("=" + self._kernel.arguments, *flat)
        said = ctypes.create_string_buffer(4096)
        of = self._kernel
        how = grid, of.threads, of.shared, self.BESIDE, ctypes.c_uint(self._seed)
        late = [(to.data_ptr(), x.data_ptr(), x.nbytes) for to, x in self.LATE]
        assert of.early or not late, "a launch that is not early finds all that was written"
        writes = (ctypes.c_uint64 * (3 * len(late)))(*(n for write in late for n in write))
        failed = self._start(packed, *how, writes, len(late), said)
        self.LATE.clear()
        if failed:
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
