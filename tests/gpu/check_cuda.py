"""What NVRTC makes of every kernel in CUDA C++, read without a GPU: `python -m tests.gpu.check_cuda --nvrtc LIBRARY`.

LIBRARY is libnvrtc.so of CUDA 12.9 or 13, as the package nvidia-cuda-nvrtc brings it; without the option it is the one
that torch uses. Each kernel is compiled for sm_90a in every form in which it is launched. Prints registers, bytes
spilled, and what ptxas says of warpgroups' products. Exits 1 where a kernel cannot be compiled, or where its products
wait for each other: a register that one of them takes is made behind the fence, or there are too few.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import re
import sys
from collections.abc import Iterator

from ring_la.kernels.runtime import cuda_kernel
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.zeros import ZEROS
from ring_la.kernels.wy import dplr_launches, gdn_launches, gla_launches, kda_launches

ARCHITECTURE = "sm_90a"
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SAID = re.compile(r"\((C75\d+)\)")
SERIALIZED = {"C7512", "C7520"}
"""ptxas' numbers for products that wait for each other."""


def kernels() -> Iterator[CudaKernel]:
    """Every form of every kernel."""
    yield ZEROS
    for keep in (False, True):
        yield dplr_launches.forward_kernel(keep)
    yield dplr_launches.backward_kernel()
    for wide in (0, 1):
        gate = f"GATE_BF16={wide}"
        for given in (False, True):
            yield from (gla_launches.forward_kernel(keep, gate, given=given) for keep in (False, True))
            yield gla_launches.backward_kernel(gate, given=given)
        yield gla_launches.forward_kernel(False, gate, maps=True)
        yield gla_launches.backward_kernel(gate, maps=True)
        step = f"BETA_BF16={wide}"
        for gated in (0, 1):
            read = f"GATED={gated}", gate, step
            yield from (gdn_launches.forward_kernel(keep, *read) for keep in (False, True))
            yield gdn_launches.forward_kernel(False, *read, maps=True)
            yield from (gdn_launches.forward_kernel(keep, *read, mailed=True) for keep in (False, True))
            yield from (gdn_launches.backward_kernel(*read, maps=maps) for maps in (False, True))
            yield gdn_launches.backward_kernel(*read, mailed=True)
        ways: tuple[dict[str, bool], ...] = ({}, {"leaves": True}, {"deferred": True})
        for name, way in itertools.product(("forward", "states", "backward"), ways):
            yield kda_launches.kernel(name, gate, step, **way)
        yield from (kda_launches.kernel(name, gate, step, maps=True) for name in ("forward", "backward"))
        yield from (kda_launches.kernel(name, gate, step, mailed=True) for name in ("forward", "states", "backward"))
        yield kda_launches.kernel("backward", gate, step, maps=True, mailed=True)


def row(kernel: CudaKernel, log: str) -> str:
    """A kernel's line."""
    stores, loads = map(int, SPILLED.search(log).groups())
    registers = REGISTERS.search(log).group(1)
    said = " ".join(sorted(set(SAID.findall(log))))
    form = f"{kernel.name:14} {' '.join(kernel.defines):58}"
    return f"{form} {registers:>4} registers, {stores:4} and {loads:4} bytes spilled  {said}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", help="libnvrtc.so")
    options = parser.parse_args()
    if options.nvrtc:
        ctypes.CDLL(options.nvrtc)
        cuda_kernel.nvrtc_file = functools.cache(lambda: options.nvrtc)
    bad = 0
    for kernel in kernels():
        _, log = cuda_kernel.build(kernel, ARCHITECTURE, "--ptxas-options=-v")
        print(row(kernel, log), flush=True)
        bad += bool(SERIALIZED & set(SAID.findall(log)))
    print(f"{bad} of these have products that wait for each other")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
