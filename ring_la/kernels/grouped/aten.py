"""PyTorch's own grouped matmul: ``torch.nn.functional.grouped_mm``, or ``torch._grouped_mm`` before it had that name.

On Hopper and Blackwell it runs CUTLASS kernels and reads the sizes on the device, for bf16; anything else it
unrolls on the host after copying the sizes there, so on CUDA only the former is used. It wants every operand's
base and strides aligned to 16 bytes, and leaves rows past the last group unwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gpu
from .product import GroupedProduct, aligned, by_matrices, by_rows
from .tail import zero_tail

MAX_GROUPS = 1024  # what its CUDA kernels' setup holds


def grouped_mm(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(x, y, offs=ends)


class Aten:
    def unsupported(self, call: GroupedProduct) -> str:
        x, y = call.x, call.y
        if not (hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")):
            return f"PyTorch {torch.__version__} has no grouped matmul"
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"PyTorch's grouped matmul does not take {x.dtype}"
        if x.is_cuda:
            if x.dtype != torch.bfloat16:
                return f"for {x.dtype} it would copy the sizes to the host; it takes bfloat16"
            if gpu.capability(x.device)[0] not in (9, 10):
                return "on this GPU it would copy the sizes to the host; it needs compute capability 9 or 10"
            if call.groups >= MAX_GROUPS:
                return f"it takes fewer than {MAX_GROUPS} groups, not {call.groups}"
        if not (aligned(by_rows(x)) and aligned(by_matrices(y) if call.product == "rows" else by_rows(y))):
            return "it needs every operand's base and strides to be multiples of 16 bytes"
        return ""

    def compute(self, call: GroupedProduct) -> Tensor:
        ends = call.ends()
        if call.product == "outer":
            return grouped_mm(by_rows(call.x).mT, by_rows(call.y), ends).contiguous()
        out = grouped_mm(by_rows(call.x), by_matrices(call.y), ends).contiguous()
        zero_tail(out, ends)
        return out


backend = Aten()
