"""MesaNet's solver in Triton against conjugate gradients in fp64 (interpreted, and on GPUs)."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, normalize

import ring_la
from ring_la.recurrences.mesa import _conjugate_gradients

from .triton_cases import error


def errors(B: int, H: int, K: int, cu: tuple[int, ...], state: bool, dtype: torch.dtype, device: str) -> float:
    """The relative error of the solutions."""
    from ring_la.kernels.conjugate_gradients.solve import System, solved

    T, N = cu[-1], B if B > 1 else len(cu) - 1
    rng = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=rng)  # noqa: E731
    q, k = (normalize(draw(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    g, beta, lam = logsigmoid(draw(B, T, H) + 2), draw(B, T, H).sigmoid(), 0.5 + draw(H, K).sigmoid()
    G = draw(N, H, K, K)
    G = (G @ G.mT / K).contiguous() if state else None
    x = solved(q, System(k, g, beta, lam, G), cu, 30)
    keys, rate = k.double(), beta.double()[..., None]
    more = dict(scale=1.0, initial_state=None if G is None else G.double())
    more |= {} if B > 1 else {"cu_seqlens": torch.tensor(cu, device=device)}

    def times(p: torch.Tensor) -> torch.Tensor:
        return ring_la.simple_gla(p, keys, rate * keys, g.double(), **more).o

    return error(x, _conjugate_gradients(times, lam.double(), q.double(), 40))
