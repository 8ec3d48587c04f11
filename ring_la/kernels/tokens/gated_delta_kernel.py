"""A token of a gated delta net between its projections, in one launch: short convolution, unit length, gates, the
recurrence, and the norm of each head with its gate.

    q, k, v = SiLU(conv(qkv)),   q, k of unit length,   g = −e^{A_log} softplus(a + dt_bias),   β = β_max σ(b)
    S ← e^g S + k (β (v − e^g Sᵀ k))ᵀ,   o = scale Sᵀ q,   out = o / rms(o) ⊙ w ⊙ SiLU(z)

A program has a key head of a sequence, and its value heads one after the other: nobody else reads what it writes over,
the convolution's tail and the states. All in fp32; only `out` is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.early import options, others_may_begin
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.spans.table import width

WARPS = 16
"""Of a program, which holds a whole state."""


@triton.jit
def _convolved(X, TAIL, CONV, channel, live, t_d, t_w, W: tl.constexpr):
    """SiLU of the convolution at some channels of a sequence's new token, whose tail moves on."""
    x = tl.load(X + channel, live, other=0.0)
    total = x.to(tl.float32) * tl.load(CONV + channel * W + W - 1, live, other=0.0).to(tl.float32)
    tail = TAIL + channel.to(tl.int64) * t_d
    for j in tl.static_range(W - 1):
        tap = tl.load(CONV + channel * W + j, live, other=0.0).to(tl.float32)
        total += tl.load(tail + j * t_w, live, other=0.0).to(tl.float32) * tap
    tl.debug_barrier()  # several threads may read a number that one of them writes over
    for j in tl.static_range(1, W - 1):
        tl.store(tail + (j - 1) * t_w, tl.load(tail + j * t_w, live, other=0.0), live)
    if W > 1:
        tl.store(tail + (W - 2) * t_w, x.to(TAIL.dtype.element_ty), live)
    return total / (1 + tl.exp(-total))


@triton.jit(do_not_specialize=("x_n", "b_n", "a_n", "z_n", "t_n"))
def _token(
    X, B, A, Z, CONV, A_LOG, DT_BIAS, C, TAIL, S, OUT, scale, beta_max, eps, x_n, b_n, a_n, z_n, t_n, t_d, t_w,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One key head of one sequence; X, B, A, Z are the projections' rows, as far apart as x_n, b_n, a_n, z_n; t_n, t_d
    and t_w are the tail's strides."""
    n, hk = (tl.program_id(0) // HK).to(tl.int64), tl.program_id(0) % HK
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    where = d[:, None] * V + e[None, :]
    S += (n * H + hk * (H // HK)) * (K * V)
    state = tl.load(S + where, inside, other=0.0)  # on its way while the convolution is computed
    X += n * x_n
    TAIL += n * t_n
    if EARLY:
        others_may_begin()
    q = _convolved(X, TAIL, CONV, hk * K + d, d < K, t_d, t_w, W)
    k = _convolved(X, TAIL, CONV, (HK + hk) * K + d, d < K, t_d, t_w, W)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    c = tl.load(C + e, e < V, other=0.0).to(tl.float32)
    for i in tl.static_range(H // HK):
        h = hk * (H // HK) + i
        v = _convolved(X, TAIL, CONV, 2 * HK * K + h * V + e, e < V, t_d, t_w, W)
        a = tl.load(A + n * a_n + h).to(tl.float32) + tl.load(DT_BIAS + h).to(tl.float32)
        soft = tl.where(a > 20.0, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
        kept = tl.exp(-tl.exp(tl.load(A_LOG + h).to(tl.float32)) * soft)
        beta = beta_max / (1 + tl.exp(-tl.load(B + n * b_n + h).to(tl.float32)))
        state *= kept
        w = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * w[None, :]
        tl.store(S + where, state, inside)
        S += K * V
        o = tl.sum(state * q[:, None], 0)
        z = tl.load(Z + n * z_n + h * V + e, e < V, other=0.0).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * c * (z / (1 + tl.exp(-z)))
        tl.store(OUT + (n * H + h) * V + e, o.to(OUT.dtype.element_ty), e < V)
        if i + 1 < H // HK:
            state = tl.load(S + where, inside, other=0.0)


def gated_delta_token(
    qkv: Tensor, b: Tensor, a: Tensor, z: Tensor, weights: Sequence[Tensor], tail: Tensor, state: Tensor, heads: int,
    beta_max: float = 1.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """``out [N, H V]`` in the dtype of `qkv`; `tail` and `state` are written over.

    Args:
        qkv: ``[N, 2 HK K + H V]``. b, a: ``[N, H]``. z: ``[N, H V]``. Rows of each may be any distance apart.
        tail: the last inputs of the convolution ``[N, 2 HK K + H V, W − 1]``, any strides.
        state: fp32 ``[N, H, K, V]``, contiguous.
        weights: as `gated_delta.Weights` has them. heads: HK.
    """
    (N, H, K, V), W = state.shape, weights[0].shape[1]
    out = torch.empty(N, H * V, dtype=qkv.dtype, device=qkv.device)
    launch(
        _token, (N * heads,), qkv, b, a, z, *weights, tail, state, out, K**-0.5, beta_max, eps,
        *(x.stride(0) for x in (qkv, b, a, z)), *tail.stride(), H=H, HK=heads, K=K, V=V, W=W, BK=width(K), BV=width(V),
        num_warps=WARPS, tensors="any", **options(qkv),
    )  # fmt: skip
    return out
