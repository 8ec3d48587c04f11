"""`kernels.fused.shares` against its equation token by token in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

import torch

from .triton_cases import error


def errors(T: int, D: int, cu: tuple[int, ...] | None, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The relative error of outputs and gradients, by name."""
    from ring_la.kernels.fused.shares import weight_shares

    B, N = (2, 2) if cu is None else (1, len(cu) - 1)
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    x = (draw(B, T, D) + torch.linspace(0, 9, T, device=device)[:, None]).to(dtype)
    z = draw(N, D)
    z[:, ::2] = -1e4
    weights = draw(B, T, D), draw(B, T, D), draw(N, D)
    offsets = None if cu is None else torch.tensor(cu, device=device)
    found = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t).clone().requires_grad_() for t in (x, z)]
        if wide:
            share, g, end = _loop(*leaves, cu)
        else:
            share, g, end = weight_shares(*leaves, offsets)
        factors = share, g.exp(), end  # where nothing was, a log-decay is any
        loss = sum((y.double() * w.double()).sum() for y, w in zip(factors, weights))
        found.append([share, g.exp(), end, *torch.autograd.grad(loss, leaves)])
    return {n: error(a, b) for n, a, b in zip(("share", "kept", "z", "dx", "dz"), *found)}


def _loop(x: torch.Tensor, z: torch.Tensor, cu: tuple[int, ...] | None) -> tuple[torch.Tensor, ...]:
    """Shares, log-decays and the last z, one token after another."""
    B, T, D = x.shape
    rows = [(b, 0, T) for b in range(B)] if cu is None else [(0, *pair) for pair in zip(cu, cu[1:])]
    share, g, ends = [], [], []
    for n, (b, start, stop) in enumerate(rows):
        now = z[n]
        for t in range(start, stop):
            after = torch.logaddexp(now, x[b, t])
            share.append((x[b, t] - after).exp())
            g.append(now - after)
            now = after
        ends.append(now)
    return torch.stack(share).view(B, T, D), torch.stack(g).view(B, T, D), torch.stack(ends)
