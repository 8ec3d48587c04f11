"""The kernels of TTT-Linear against PyTorch's operations in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ring_la.linear.in_order import DocumentRun
from ring_la.recurrences.ttt import MiniBatches

from .triton_cases import error

NAMES = ("o", "end", "dq", "dk", "dv", "deta", "dw", "db", "dstate")


def errors(
    B: int, T: int, H: int, K: int, size: int, position: int | None, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """The relative error of outputs and gradients, by name.

    Of whole calls, or (`position`) of a run that begins within a document, where o is z.
    """
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    x = [normalize(draw(B, T, H, K), dim=-1).to(dtype) for _ in range(2)] + [draw(B, T, H, K).to(dtype)]
    x += [0.1 * draw(B, T, H).sigmoid(), 1 + 0.1 * draw(H, K), draw(H, K), draw(B, H, 2, K + 1, K) / K**0.5]
    if not position:
        x[-1][:, :, 1] = 0  # no gradients yet
    do, dend = draw(B, T, H, K), draw(*x[-1].shape)
    run = DocumentRun(0, T, position or 0, 0, True, True, 0)

    def results(wide: bool) -> list[Tensor]:
        leaves = [t.to(torch.double if wide else t.dtype, copy=True).requires_grad_() for t in x]
        q, k, v, eta, w, b, S = leaves
        body = MiniBatches(size, 1e-6, 0.5, kernels=not wide)
        if position is None and not wide:
            o, end = body.whole(S, q, k, v, eta, w, b)
        else:
            o, end = body(run, S, q.to(S.dtype), k, v, eta[..., None], w, b)
        if position is None and wide:
            centred = o - o.mean(-1, keepdim=True)
            o = o + centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w + b
        grads = torch.autograd.grad([o, end], leaves, [do.to(o.dtype), dend.to(end.dtype)])
        if not (position or 0) % size:
            grads[-1][:, :, 1] = 0  # sums that a mini-batch does not begin with
        return [o, end, *grads]

    return {n: error(a, b) for n, a, b in zip(NAMES, results(False), results(True))}
