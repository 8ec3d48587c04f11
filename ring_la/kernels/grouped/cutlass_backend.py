"""CUTLASS, through its Python packages nvidia-cutlass-operators and nvidia-cutlass-dsl (the extra ``cutlass``).

``cutlass.operators`` describes a grouped GEMM as ``IndexPtrGroupedGemmArguments`` with offsets that stay on the
device, and offers the operators that can run it. In release 0.3.0 those are for Blackwell (compute capability 10)
and for rows products of packed operands with every B[g] stored by columns, which is how weights [G, N, K] look as
``weights.mT``; the gradient of A then needs B by rows and the gradient of B an outer product, so "auto" computes
both. On Hopper CUTLASS is reached through PyTorch's grouped matmul instead (aten.py).

An operator is compiled once for a dtype and device; shapes and sizes stay dynamic.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import gpu
from .product import GroupedProduct, aligned, installed
from .tail import zero_tail


def operators() -> ModuleType:
    return importlib.import_module("cutlass.operators")


class Cutlass:
    def __init__(self) -> None:
        self.ready: dict[tuple[torch.dtype, torch.device], tuple[Any, Any]] = {}

    def unsupported(self, call: GroupedProduct) -> str:
        if not installed("cutlass.operators"):
            return "nvidia-cutlass-operators is not installed"
        if not call.x.is_cuda:
            return f"it runs on CUDA, not on {call.x.device.type}"
        if gpu.capability(call.x.device)[0] != 10:
            return "its grouped operators need compute capability 10 (on 9, 'torch' runs CUTLASS kernels)"
        return self.unsupported_layout(call)

    def unsupported_layout(self, call: GroupedProduct) -> str:
        """What CUTLASS's operators do not take, whatever the machine."""
        if call.product != "rows":
            return "it has no operator for the outer product, the gradient of b"
        if call.x.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, not {call.x.dtype}"
        if not call.x.is_contiguous() or not call.y.mT.is_contiguous():
            return "it needs a contiguous and every b[g] stored by columns (b = weights.mT of contiguous [G, N, K])"
        if not (aligned(call.x) and aligned(call.y) and call.y.shape[-1] * call.x.element_size() % 16 == 0):
            return "it needs every operand's base and strides to be multiples of 16 bytes"
        return ""

    def compute(self, call: GroupedProduct) -> Tensor:
        out, ends = call.empty(), call.ends()
        arguments = operators().IndexPtrGroupedGemmArguments(
            A=call.x, B=call.y, out=out, accumulator_type=torch.float32, offsets=ends, offsets_along="m"
        )
        operator, artifact = self.compiled(call, arguments)
        stream = torch.cuda.current_stream(call.x.device) if call.x.is_cuda else None
        operator.run(arguments, compiled_artifact=artifact, stream=stream, assume_supported_args=True)
        zero_tail(out, ends)
        return out

    def compiled(self, call: GroupedProduct, arguments: Any) -> tuple[Any, Any]:
        """An operator for this dtype and device and its artifact: the largest tile there is, on two SMs if it can."""
        key = (call.x.dtype, call.x.device)
        if key not in self.ready:
            target = "{}{}a".format(*gpu.capability(call.x.device)) if call.x.is_cuda else None
            found = operators().get_operators(arguments, target_sm=target)
            if not found:
                raise RuntimeError(f"cutlass.operators offers no grouped GEMM of {call.x.dtype} for sm_{target}")
            operator = max(found, key=lambda op: (op.metadata.design.tile_shape[:2], op.metadata.design.use_2cta_mma))
            self.ready[key] = operator, operator.compile(arguments, target_sm=target)
        return self.ready[key]


backend = Cutlass()
