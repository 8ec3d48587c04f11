"""The other ways to compute grouped products, for ``ring-la bench grouped``: as bare as they come."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ring_la.grouped_gemm import grouped_gemm
from ring_la.kernels.grouped import GroupedProduct, load
from ring_la.kernels.grouped.aten import grouped_mm


def contenders(kind: str, call: GroupedProduct) -> dict[str, Callable[[], object]]:
    """The ways to compute one product."""
    ends = call.ends()
    x, y = call.x, call.y
    host = call._replace(sizes=call.sizes.cpu())
    functions: dict[str, Callable[[], object]] = {
        "dense": (lambda: x.mT @ y) if kind == "outer" else (lambda: x @ y[0]),
        "loop": lambda: load("loop").compute(host),
    }
    if not load("torch").unsupported(call):
        functions["torch"] = lambda: grouped_mm(x.mT if kind == "outer" else x, y, ends)
    for name in ("cutlass", "triton"):
        if not load(name).unsupported(call):
            functions[name] = lambda name=name: load(name).compute(call)
    operator = torch.ops.ring_la.grouped_outer if kind == "outer" else torch.ops.ring_la.grouped_rows
    functions["auto"] = lambda: operator(x, y, call.sizes, "auto", True)
    return functions


def training(a: Tensor, b: Tensor, dc: Tensor, sizes: list[int], device_sizes: Tensor) -> dict[str, Callable]:
    """Forward and both gradients through autograd."""
    a, b, w = a.detach().requires_grad_(), b.detach().requires_grad_(), b[0].detach().requires_grad_()
    ends = torch.cumsum(device_sizes, 0, dtype=torch.int32)

    def loop() -> Tensor:
        return torch.cat([x @ y for x, y in zip(a.split(sizes), b.unbind(), strict=True)])

    forwards = {
        "dense": lambda: a @ w,
        "loop": loop,
        "torch": lambda: grouped_mm(a, b, ends),
        "triton": lambda: grouped_gemm(a, b, device_sizes, backend="triton"),
        "auto": lambda: grouped_gemm(a, b, device_sizes),
    }
    call = GroupedProduct("rows", a.detach(), b.detach(), device_sizes)
    return {
        name: lambda name=name, f=f: torch.autograd.grad(f(), (a, w if name == "dense" else b), dc)
        for name, f in forwards.items()
        if name not in ("torch", "triton") or not load(name).unsupported(call)
    }
