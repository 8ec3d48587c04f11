"""`kernels.fused.precondition` against its equation token by token in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .triton_cases import error

EPS = 1e-6


def loop(k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, A: Tensor, cu: tuple[int, ...] | None, base: float):
    """(k̂, A after each document), one token after another."""
    B, T, H = h.shape
    k = k.repeat_interleave(H // k.shape[2], 2)
    rows = [(b, 0, T) for b in range(B)] if cu is None else [(0, *pair) for pair in zip(cu, cu[1:])]
    written, ends = [], []
    for n, (b, start, stop) in enumerate(rows):
        now = A[n]
        for t in range(start, stop):
            now = h[b, t].exp()[:, None] * now + alpha[b, t][:, None] * k[b, t] ** 2
            r = torch.log(now + EPS) - center[:, None]
            written.append(k[b, t] * base ** (-r / (1 + r.abs())))
        ends.append(now)
    return torch.stack(written).view(B, T, H, -1), torch.stack(ends)


def errors(T: int, K: int, cu: tuple[int, ...] | None, dtype: torch.dtype, device: str, H: int = 4) -> dict[str, float]:
    """The relative error of outputs and gradients, by name."""
    from ring_la.kernels.fused.precondition import precondition

    B, N = (2, 2) if cu is None else (1, len(cu) - 1)
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    k = torch.nn.functional.normalize(draw(B, T, H // 2, K), dim=-1).to(dtype)
    h = -torch.linspace(0.01, 2, H, device=device) * draw(B, T, H).sigmoid()
    x = [k, h, draw(B, T, H).sigmoid(), draw(H) - 4, draw(N, H, K).abs() / K]
    do, dA = draw(B, T, H, K), draw(N, H, K)
    ours, wide = [t.clone().requires_grad_() for t in x], [t.double().requires_grad_() for t in x]
    offsets = None if cu is None else torch.tensor(cu, device=device)
    got, true = precondition(*ours, offsets, 1.5, EPS), loop(*wide, cu, 1.5)
    pairs = {"written": (got[0], true[0]), "A": (got[1], true[1])}
    for (o, A), leaves in ((got, ours), (true, wide)):
        grads = torch.autograd.grad([o, A], leaves, [do.to(o.dtype), dA.to(A.dtype)])
        for name, d in zip(("dk", "dh", "dalpha", "dcenter", "dA0"), grads):
            pairs[name] = (*pairs.get(name, ()), d)
    assert math.isfinite(sum(float(a.detach().sum()) for a, _ in pairs.values()))
    return {n: error(a, b) for n, (a, b) in pairs.items()}
