"""The triangular inverse of the delta rules: device code.

WY form (Yang et al. 2024, arXiv:2406.06484; with decay, arXiv:2412.06464): over a chunk, S_t = e^{G_t} S + Σ_{s≤t}
e^{G_t−G_s} k_s u_sᵀ with (I + L) U = β(V − e^G K S), L_ts = β_t e^{G_t−G_s} k_t·k_s for s < t. M = (I + L)⁻¹,
kept as M − I: what M multiplies is added to that product in fp32, and is rounded only where it meets other tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.wy.levels import level_mask


@triton.jit
def invert(L, C: tl.constexpr, PREC: tl.constexpr):
    """(I + L)⁻¹ − I for a strictly lower triangular L [C, C]: blocks of 16 by substitution, then pairs of blocks by
    products.

    For [[P, 0], [X, Q]] the inverse's corner is −Q⁻¹ X P⁻¹; no power of L is ever formed.
    """
    NB: tl.constexpr = C // 16
    t = tl.arange(0, C)
    i = tl.arange(0, 16)
    block = tl.arange(0, NB)
    same = block[:, None, None, None] == block[None, None, :, None]
    L3 = tl.sum(tl.where(same, tl.reshape(L, [NB, 16, NB, 16]), 0.0), 2)
    P3 = tl.zeros([NB, 16, 16], tl.float32) + (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]
    for s in range(15):
        column = tl.sum(tl.where((i == s)[None, None, :], L3, 0.0), 2)
        row = tl.sum(tl.where((i == s)[None, :, None], P3, 0.0), 1)
        P3 -= column[:, :, None] * row[:, None, :]
    P = tl.reshape(tl.where(same, P3[:, :, None, :], 0.0), [C, C])
    if C >= 32:
        X = tl.where(level_mask(t, 4), L, 0.0)
        P -= tl.dot(tl.dot(P, X, input_precision=PREC), P, input_precision=PREC)
    if C >= 64:
        X = tl.where(level_mask(t, 5), L, 0.0)
        P -= tl.dot(tl.dot(P, X, input_precision=PREC), P, input_precision=PREC)
    return P - (t[:, None] == t[None, :]).to(tl.float32)
