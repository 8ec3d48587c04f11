"""Inputs every conformance test draws: decays that differ per head and token, packed documents, odd lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RECURRENCES = (
    "linear_attention",
    "retention",
    "lightning_attention",
    "simple_gla",
    "mamba2",
    "gla",
    "hgrn2",
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "rwkv7",
    "dplr_delta_rule",
)

DOCUMENTS = {
    "dense": (144, None),
    "uneven": (131, None),
    "packed": (150, (0, 7, 7, 8, 70, 71, 150)),  # an empty document, one token long ones, one over many shards
    "many": (97, (0, 3, 5, 9, 14, 20, 27, 35, 44, 54, 65, 77, 90, 97)),
    "single": (118, (0, 118)),
    "short": (3, None),
    "short packed": (3, (0, 1, 3)),
}
"""name: (tokens of the whole sequence, cu_seqlens or None for an unpacked batch)."""


def gates(*shape: int, generator: torch.Generator, heads: int = 2) -> Tensor:
    """Log-decays from nearly none to strong forgetting, different per head and per token, fp64."""
    strength = torch.logspace(-3, 0.5, shape[heads], dtype=torch.float64)
    strength = strength.view(*[1] * heads, -1, *[1] * (len(shape) - heads - 1))
    return -strength * torch.rand(*shape, generator=generator, dtype=torch.float64)


def make_inputs(
    name: str,
    B: int = 1,
    T: int = 100,
    Hk: int = 2,
    H: int = 4,
    K: int = 6,
    V: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor | bool]:
    """Arguments of the recurrence `name`, by name; floats are leaves that want gradients."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, v = normal(B, T, Hk, K), normal(B, T, H, V)
    k = F.normalize(normal(B, T, Hk, K), dim=-1)
    beta = torch.sigmoid(normal(B, T, H))
    g, gk = gates(B, T, H, generator=rng), gates(B, T, H, K, generator=rng)
    a = -F.normalize(normal(B, T, H, K), dim=-1)
    b = -a * torch.rand(B, T, H, K, generator=rng, dtype=torch.float64)
    dt, A = normal(B, T, H), -torch.logspace(-2, 0.5, H, dtype=torch.float64)
    static = -torch.logspace(-3, 0, H, dtype=torch.float64)
    tensors = {
        "linear_attention": dict(q=q, k=k, v=v),
        "retention": dict(q=q, k=k, v=v),
        "lightning_attention": dict(q=q, k=k, v=v, g=static),
        "simple_gla": dict(q=q, k=k, v=v, g=g),
        "mamba2": dict(x=v, dt=dt, A=A, B=k, C=q, D=normal(H), dt_bias=normal(H)),
        "gla": dict(q=q, k=k, v=v, g=gk),
        "hgrn2": dict(q=q, g=gk[:, :, :Hk], v=v),
        "delta_rule": dict(q=q, k=k, v=v, beta=beta),
        "gated_delta_rule": dict(q=q, k=k, v=v, g=g, beta=beta),
        "kda": dict(q=q, k=k, v=v, g=gk, beta=beta),
        "rwkv7": dict(r=q, w=gk, k=k, v=v, a=a, b=b),
        "dplr_delta_rule": dict(q=q, k=k, v=v, a=a, b=b, g=gk),
    }[name]
    out: dict[str, Tensor | bool] = {n: x.to(dtype).contiguous().requires_grad_() for n, x in tensors.items()}
    return out | ({"dt_softplus": True} if name == "mamba2" else {})


STATIC = {"lightning_attention": ("g",), "mamba2": ("A", "D", "dt_bias")}
"""Inputs without a token dimension: shared, their gradient is each rank's part."""


def error(got: Tensor, want: Tensor) -> float:
    """Relative error ‖got − want‖ / ‖want‖ (absolute where want is all zero); NaN counts as infinite."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = want.norm()
    return float((got - want).norm() / norm) if norm > 0 else float((got - want).norm())
