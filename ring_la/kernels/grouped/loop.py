"""One matmul a group: the CPU's and fp64's backend, and the one to read first.

It must know the sizes on the host. On CUDA that is a synchronisation (and no CUDA graph) unless the sizes are
already on the CPU, so "auto" comes here on CUDA only for dtypes nobody else takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .product import GroupedProduct


class GroupLoop:
    def unsupported(self, call: GroupedProduct) -> str:
        if not call.x.dtype.is_floating_point:
            return f"it multiplies floating-point numbers, not {call.x.dtype}"
        if call.x.is_cuda and call.sizes.is_cuda and torch.cuda.is_current_stream_capturing():
            return "it reads the sizes on the host, which a CUDA graph being captured forbids"
        return ""

    def compute(self, call: GroupedProduct) -> Tensor:
        out = call.empty()
        start, rows = 0, call.x.shape[0]
        for g, size in enumerate(call.sizes.tolist()):
            end = min(start + size, rows)
            x = call.x[start:end]
            if call.product == "rows":
                torch.mm(x, call.y[g], out=out[start:end])
            else:
                torch.mm(x.mT, call.y[start:end], out=out[g])
            start = end
        if call.product == "rows":
            out[start:].zero_()
        return out


backend = GroupLoop()
