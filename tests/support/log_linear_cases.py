"""The kernels of log-linear attention against PyTorch's operations in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ring_la.kernels.fenwick.plain import LogLinearInputs, within

from .triton_cases import error

Runs = tuple[tuple[int, int, int], ...]


def errors(
    B: int, heads: tuple[int, int], sizes: tuple[int, int], runs: Runs, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """The relative error of o and gradients, by name.

    heads: of keys, of values. sizes: K, V. runs: start, stop, position of each, the last stop being T.
    """
    from ring_la.kernels.fenwick.operator import log_linear

    (Hk, H), (K, V), T = heads, sizes, runs[-1][1]
    levels = max(p + b - a - 1 for a, b, p in runs).bit_length() + 1
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    x = [F.normalize(draw(B, T, Hk, K), dim=-1).to(dtype) for _ in range(2)] + [draw(B, T, H, V).to(dtype)]
    x += [0.1 * F.logsigmoid(draw(B, T, H)), draw(B, T, H, levels)]
    do, scale = draw(B, T, H, V), 0.3
    ours, wide = ([t.to(kind or t.dtype, copy=True).requires_grad_() for t in x] for kind in (None, torch.double))
    q, k = (t.repeat_interleave(H // Hk, 2) for t in wide[:2])
    tokens = LogLinearInputs(q * scale, k, *wide[2:])
    true = torch.cat([within(LogLinearInputs(*(t[:, a:b] for t in tokens)), p) for a, b, p in runs], 1)
    got = log_linear(*ours, [n for run in runs for n in run], scale)
    pairs = [(got, true)]
    pairs += zip(torch.autograd.grad(got, ours, do.to(got.dtype)), torch.autograd.grad(true, wide, do.double()))
    return {n: error(a, b) for n, (a, b) in zip(("o", "dq", "dk", "dv", "dg", "dlam"), pairs)}
