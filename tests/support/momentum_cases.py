"""The kernels of the momentum delta rule against PyTorch's operations in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ring_la
from ring_la.kernels.momentum.chunks import chunks
from ring_la.recurrences import momentum
from ring_la.testing.recurrences import Truth
from ring_la.testing.recurrences import errors as split

from . import pool
from .interpreter import interpreted
from .recurrence_cases import BY_NAME
from .triton_cases import error

NAMES = ("o", "S", "M", "dq", "dk", "dv", "dp", "dg", "dmu", "dbeta", "deta", "dS", "dM")


def arguments(T: int, N: int, H: int = 2, K: int = 16, V: int = 24, B: int = 1, device: str = "cpu") -> list[Tensor]:
    """q, k, v, p, g, mu, beta and eta of T tokens, and S and M before N documents, in fp32."""
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    q, k, p = (normalize(draw(B, T, H, K), dim=-1) for _ in range(3))
    gates = [logsigmoid(draw(B, T, H) + n) for n in (3, 1)] + [draw(B, T, H).sigmoid() for _ in range(2)]
    return [q, k, draw(B, T, H, V), p, *gates, *(draw(N, H, K, V) for _ in range(2))]


def errors(
    B: int, H: int, K: int, V: int, cu: Sequence[int], states: bool, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """The relative error of outputs, states and gradients, by name."""
    T, N = cu[-1], max(B, len(cu) - 1)
    x = [t.to(dtype) if n < 4 else t for n, t in enumerate(arguments(T, N, H, K, V, B, device))]
    rng = torch.Generator(device).manual_seed(1)
    do, *dends = (torch.randn(t.shape, device=device, generator=rng) for t in (x[2], *x[-2:]))
    do = do.to(dtype)
    packed = dict(cu_seqlens=torch.tensor(cu, device=device)) if B == 1 else {}

    def results(wide: bool) -> list[Tensor]:
        leaves = [t.to(torch.double if wide else t.dtype, copy=True).requires_grad_() for t in x]
        *tokens, S, M = leaves
        start = (S, M) if states else None
        if wide:
            more = dict(initial_state=start, output_final_state=True, backend="torch", scale=0.5)
            o, ends = ring_la.momentum_delta_rule(*tokens, **more, **packed)
        else:
            o, *ends = chunks(tokens, start, cu, 0.5)
        wanted = leaves if states else tokens
        grads = torch.autograd.grad([o, *ends], wanted, [t.to(g.dtype) for t, g in zip((do, *dends), (o, *ends))])
        return [o, *ends, *grads]

    return {n: error(a, b) for n, a, b in zip(NAMES, results(False), results(True))}


def rank_errors(rank: int, dtype: torch.dtype, cu: tuple[int, ...] | None, kind: str) -> dict[str, float]:
    """The relative error of this rank's part of a split call by the kernels, on GPUs, heads of 64 and 48."""
    cp = ring_la.ContextParallel(pool.group(), scan="ring")
    T, N = (300, 2) if cu is None else (cu[-1], len(cu) - 1)
    x = arguments(T, N, 3, 64, 48, 2 if cu is None else 1, str(cp.device))
    x = [t.to(dtype) if n < 4 else t for n, t in enumerate(x)]
    layout = cp.layout(T, kind, cu_seqlens=cu)
    rng = torch.Generator(cp.device).manual_seed(1)
    do = torch.randn(x[2].shape, device=cp.device, generator=rng).to(dtype)

    def results(wide: bool) -> list[Tensor]:
        leaves = [t.to(torch.double if wide else t.dtype, copy=True).requires_grad_() for t in x]
        *tokens, S, M = leaves
        more = dict(initial_state=(S, M), output_final_state=True, scale=0.5)
        if wide:
            packed = {} if cu is None else dict(cu_seqlens=torch.tensor(cu, device=cp.device))
            o, ends = ring_la.momentum_delta_rule(*tokens, **more, **packed, backend="torch")
        else:
            local = [layout.shard(t) for t in tokens]
            o, ends = ring_la.momentum_delta_rule(*local, **more, layout=layout, backend="triton")
        found = torch.autograd.grad(o, leaves, (do if wide else layout.shard(do)).to(o.dtype))
        if wide:
            return [layout.shard(t) for t in (o, *found[:8])] + [*ends, *found[8:]]
        return [o, *(layout.shard(d) for d in found[:8]), *ends, *found[8:]]

    names = ("o", *NAMES[3:11], "S", "M", "dS", "dM")
    return {n: error(a, b) for n, a, b in zip(names, results(False), results(True)) if b.numel()}


def split_errors(rank: int, documents: str) -> dict[str, float]:
    """The relative error of all that a split call gives by the kernels, interpreted, in fp32."""
    interpreted()
    kept = momentum.unsupported
    momentum.unsupported = lambda given: ""
    try:
        true = Truth(BY_NAME["momentum_delta_rule"], documents, torch.float32)
        return split(ring_la.momentum_delta_rule, true, ring_la.ContextParallel(pool.group()), backend="triton")
    finally:
        momentum.unsupported = kept
