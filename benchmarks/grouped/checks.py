"""Correctness of grouped products against fp64, before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.grouped_gemm import grouped_gemm
from ring_la.kernels.grouped import BACKENDS, GroupedProduct, load

from ..errors import relative_error
from .products import KINDS, call_of, operands


def truth_of(call: GroupedProduct) -> Tensor:
    return load("loop").compute(call._replace(x=call.x.double(), y=call.y.double(), sizes=call.sizes.cpu()))


CHECKS = (
    # sizes, K, N, dtype, spare rows past the sizes
    ([300, 0, 1, 77, 512, 130, 0, 45], 256, 384, torch.bfloat16, 0),
    ([300, 0, 1, 77, 512, 130, 0, 45], 64, 128, torch.bfloat16, 100),
    ([300, 0, 1, 77, 512, 130, 0, 45], 128, 64, torch.bfloat16, 3),
    ([5] * 40 + [0] * 20 + [700], 520, 1032, torch.bfloat16, 9),
    ([300, 0, 1, 77], 100, 75, torch.bfloat16, 5),
    ([300, 0, 1, 77], 256, 384, torch.float16, 5),
    ([300, 0, 1, 77], 100, 96, torch.float32, 5),
    ([0, 0, 0], 64, 64, torch.bfloat16, 64),
)


def check_product(case: tuple, kind: str) -> list[dict]:
    """One of `CHECKS` on every backend: its error against fp64 beside the loop's; NaN waits in the spare rows."""
    sizes, k, n, dtype, spare = case
    a, b, dc = operands(sum(sizes) + spare, len(sizes), k, n, dtype)
    a[sum(sizes) :], dc[sum(sizes) :] = float("nan"), float("nan")
    call = call_of(kind, a, b, dc, torch.tensor(sizes, device="cuda"))
    truth, lines = truth_of(call), []
    low = relative_error(load("loop").compute(call), truth)
    for name in BACKENDS:
        reason = load(name).unsupported(call)
        line = {"kind": kind, "backend": name, "dtype": str(dtype), "K": k, "N": n, "G": len(sizes)}
        if not reason:
            found = relative_error(load(name).compute(call), truth)
            line |= {"error": found, "of the loop": low, "ok": bool(found <= 2 * low + 1e-6)}
        else:
            line |= {"refused": reason}
        lines.append(line)
    return lines


def check_all() -> list[dict]:
    """Every product of every case."""
    return [line for case in CHECKS for kind in KINDS for line in check_product(case, kind)]


def check_training() -> list[dict]:
    """Gradients through autograd: without any host synchronisation, compiled, and captured in a CUDA graph."""
    sizes = torch.tensor([300, 0, 1, 77, 512, 130, 0, 44], device="cuda")
    a, b, dc = operands(1064, 8, 256, 128, torch.bfloat16)
    x, y = a.double().requires_grad_(), b.double().requires_grad_()
    truth = torch.autograd.grad(grouped_gemm(x, y, sizes, backend="loop"), (x, y), dc.double())
    a.requires_grad_(), b.requires_grad_()
    whole = torch.compile(lambda a, b: grouped_gemm(a, b, sizes), fullgraph=True, dynamic=True, backend="aot_eager")

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(grouped_gemm(a, b, sizes), (a, b), dc)

    def unsynchronised() -> tuple[Tensor, ...]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def captured() -> tuple[Tensor, ...]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grads = train()
        graph.replay()
        return tuple(grad.clone() for grad in grads)

    ways = {
        "eager, synchronisation forbidden": unsynchronised,
        "compiled": lambda: torch.autograd.grad(whole(a, b), (a, b), dc),
        "CUDA graph": captured,
    }
    lines = []
    for how, way in ways.items():
        try:
            errors = [relative_error(ours, theirs) for ours, theirs in zip(way(), truth, strict=True)]
            lines.append({"kind": "dA, dB", "backend": f"auto, {how}", "error": errors, "ok": max(errors) < 1e-2})
        except Exception as failure:
            lines.append({"kind": "dA, dB", "backend": f"auto, {how}", "failure": repr(failure)[:300], "ok": False})
    return lines
