"""Convolutions by their kernels, by PyTorch's operations and by autograd, on the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.kernels.fused.short_conv import plain_convolve, plain_convolve_backward
from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.fused import short_conv_kernel as conv  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "plain": dict(B=2, T=45, D=20, W=4),
    "packed": dict(T=40, D=16, W=4, cu=(0, 2, 2, 3, 36, 40), lead=True, ends=True, bias=True),
    "wide": dict(T=37, D=130, W=8, cu=(0, 5, 37), lead=True, ends=True, silu=False),
    "far from borders": dict(T=230, D=8, W=4, cu=(0, 100, 230), lead=True, ends=True),
    "short": dict(B=2, T=1, D=8, W=4, lead=True, ends=True),
    "one tap": dict(T=9, D=8, W=1, ends=True, bias=True),
}


def both(case: dict, forward, backward) -> list[Tensor]:
    """Outputs and gradients by a pair of functions."""
    torch.manual_seed(0)
    B, T, D, W, cu = case.get("B", 1), case["T"], case["D"], case["W"], case.get("cu")
    silu, ends, pieces = case.get("silu", True), case.get("ends", False), len(cu or (0, 0)) - 1
    x = torch.randn(B, T, D + 5, device=DEVICE, dtype=case.get("dtype", torch.float32))[:, :, :D]
    weight, bias = torch.randn(D, W, device=DEVICE), torch.randn(D, device=DEVICE) if "bias" in case else None
    lead = torch.randn(B, pieces, D, W - 1, device=DEVICE).mT if "lead" in case else None
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    do = torch.randn(B, T, D, device=DEVICE).to(x.dtype)
    dends = torch.randn(B, pieces, W - 1, D, device=DEVICE).to(x.dtype) if ends else None
    o, last = forward(x, weight, bias, lead, cu, silu, ends)
    grads = backward(do, dends, x, weight, bias, lead, cu, silu)
    return [o, *([last] if ends else []), *(g for g in grads if g is not None)]


def by_autograd(do, dends, x, weight, bias, lead, cu, silu) -> tuple[Tensor | None, ...]:
    tensors = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias, lead)]
    o, last = plain_convolve(*tensors, cu, silu, dends is not None)
    outputs, grads = ([o], [do.double()]) if dends is None else ([o, last], [do.double(), dends.double()])
    given = [t for t in tensors if t is not None]
    found = iter(torch.autograd.grad(outputs, given, grads, materialize_grads=True))
    return tuple(None if t is None else next(found) for t in tensors)


def in_fp64(x, weight, bias, lead, cu, silu, ends):
    return plain_convolve(*(None if t is None else t.double() for t in (x, weight, bias, lead)), cu, silu, ends)


def conv_case(case: dict) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(true, by the kernels, by PyTorch): outputs and gradients."""
    true = both(case, in_fp64, by_autograd)
    plain = both(case, plain_convolve, plain_convolve_backward)
    return true, both(case, conv.forward, conv.backward), plain
