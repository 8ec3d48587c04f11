"""Index queries and keys in 8 bits, as DeepSeek-V3.2 computes its scores: rotated by a Hadamard matrix, which leaves
products as they are and spreads large channels over all, and divided by the largest number of their row.

    I_ij = k'_j Σ_h w_ih q'_ih relu(Q_ihᵀ K_j),       q = q' Q, k = k' K, Q and K in float8_e4m3fn
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""
AT_ONCE = 1 << 16
"""Tokens that are rotated at once."""


class EightBits(NamedTuple):
    """An index call in 8 bits."""

    q: Tensor
    """float8_e4m3fn ``[B, T, Hi, D']``, D' the next power of two."""
    k: Tensor
    """float8_e4m3fn ``[B, Tk, D']``."""
    w: Tensor
    """fp32 ``[B, T, Hi]``: w times q'."""
    sizes: Tensor
    """fp32 ``[B, Tk]``: k'."""


def eight_bits(q: Tensor, k: Tensor, w: Tensor) -> EightBits:
    """``q [B, T, Hi, D]``, ``k [B, Tk, D]`` and ``w [B, T, Hi]`` of a call."""
    (q, of_q), (k, sizes) = (_rounded(x) for x in (q, k))
    return EightBits(q, k, w.float() * of_q, sizes)


def hadamard(n: int, device: torch.device) -> Tensor:
    """Fp32 ``[n, n]``, orthogonal, of equal magnitudes (Sylvester's). n: a power of two."""
    H = torch.ones(1, 1, device=device)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H * n**-0.5


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [B, T, …, D]``, rotated, in 8 bits, and the factors ``[B, T, …]``."""
    D = x.shape[-1]
    padded = 1 << max(0, D - 1).bit_length()
    H = hadamard(padded, x.device)[:D]
    out = torch.empty(*x.shape[:-1], padded, dtype=torch.float8_e4m3fn, device=x.device)
    sizes = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    for a in range(0, x.shape[1], AT_ONCE):
        some = slice(a, a + AT_ONCE)
        turned = x[:, some].float() @ H
        sizes[:, some] = turned.abs().amax(-1).clamp(min=1e-30) / LARGEST
        out[:, some] = (turned / sizes[:, some, ..., None]).to(out.dtype)
    return out, sizes
