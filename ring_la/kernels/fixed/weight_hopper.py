"""Launches of `weight.cu`, a weight's gradient over full blocks in CUDA C++ for Hopper."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ring_la.kernels.runtime import cuda_kernel
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.spans.table import cdiv

TILE = 128, 192
SHARED = 5 * 40960 + 5 * 16 + 1024


@functools.cache
def kernel(dtype: torch.dtype, wide: bool, add: bool) -> CudaKernel:
    """Of operands of this dtype; `wide`: fp32 out, `add`: to what is there."""
    file = Path(__file__).parent / "weight.cu"
    defines = f"HALVES={int(dtype == torch.float16)}", f"WIDE={int(wide)}", f"ADD={int(add)}"
    return CudaKernel(file, "weight", "6Q4i", 384, SHARED, defines)


@functools.cache
def programs(device: torch.device) -> int:
    """Programs that run at a time: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def reason_against(dy: Tensor, x: Tensor) -> str:
    """Why it cannot take these, or an empty string: by widths, dtype and device alone."""
    if dy.element_size() != 2:
        return f"dtype {dy.dtype}"
    if dy.shape[1] % 8 or x.shape[1] % 8:
        return f"widths {dy.shape[1]} and {x.shape[1]}: rows on 16-byte boundaries"
    if not dy.is_cuda or torch.cuda.get_device_capability(dy.device)[0] != 9:
        return f"device {dy.device}"
    return cuda_kernel.unsupported()


def add_blocks(
    dy: Tensor, x: Tensor, places: Tensor, norms_y: Tensor, norms_x: Tensor, out: Tensor, add: bool, full: bool = True
) -> None:
    """``Σ dyᵀ x [N, K]`` over full blocks at `places`, int32 ``[count, 2]``, into `out`, or added to it (fp32, fp64);
    see `weight.block_sums`."""
    assert full
    if out.dtype == torch.float64:
        part = torch.empty_like(out, dtype=torch.float32)
        add_blocks(dy, x, places, norms_y, norms_x, part, False)
        out.add_(part) if add else out.copy_(part)
        return
    N, K, here = dy.shape[1], x.shape[1], programs(dy.device)
    grid = min(here, cdiv(N, TILE[0]) * cdiv(K, TILE[1]))
    run = kernel(dy.dtype, out.dtype == torch.float32, add)
    run(grid, dy, x, places, norms_y, norms_x, out, len(places), N, K, grid)
