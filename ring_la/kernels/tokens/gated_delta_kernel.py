"""A token of a gated delta net between its projections, in one launch: short convolution, unit length, gates, the
recurrence, and the norm of each head with its gate.

    q, k, v = SiLU(conv(qkv)),   q, k of unit length,   g = −e^{A_log} softplus(a + dt_bias),   β = β_max σ(b)
    S ← e^g S + k (β (v − e^g Sᵀ k))ᵀ,   o = scale Sᵀ q,   out = o / rms(o) ⊙ w ⊙ SiLU(z)

A program has a key head of a sequence, and its value heads one after the other: nobody else reads what it writes over,
the convolution's tail and the states. q, k and v of a head are rows of one tile, of which a thread has two channels.
What the step before left is loaded before the launch before this one has ended (`runtime.early`). All in fp32; only
`out` is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.early import options, others_may_begin
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.sizes import width

CHANNELS = 128
PROGRAM = (8, 128)
"""Warps of a program with `CHANNELS` channels, fewer of fewer, and registers of a thread (0: any): two such programs
fit a multiprocessor (benchmarks.tuning.delta_token)."""


@triton.jit
def _taps(TAIL, CONV, channel, live, t_d, t_w, W: tl.constexpr):
    """What the convolution has of the tokens before the new one."""
    total = tl.zeros(channel.shape, tl.float32)
    for j in tl.static_range(W - 1):
        x = tl.load(TAIL + channel.to(tl.int64) * t_d + j * t_w, live, other=0.0).to(tl.float32)
        total += x * tl.load(CONV + channel * W + j, live, other=0.0).to(tl.float32)
    return total


@triton.jit
def _convolved(X, TAIL, CONV, total, channel, live, t_d, t_w, W: tl.constexpr):
    """SiLU of the convolution at the new token, whose tail moves on."""
    x = tl.load(X + channel, live, other=0.0)
    total += x.to(tl.float32) * tl.load(CONV + channel * W + W - 1, live, other=0.0).to(tl.float32)
    tail = TAIL + channel.to(tl.int64) * t_d
    tl.debug_barrier()  # several threads may read a number that one of them writes over
    for j in tl.static_range(1, W - 1):
        tl.store(tail + (j - 1) * t_w, tl.load(tail + j * t_w, live, other=0.0), live)
    if W > 1:
        tl.store(tail + (W - 2) * t_w, x.to(TAIL.dtype.element_ty), live)
    return total / (1 + tl.exp(-total))


@triton.jit(do_not_specialize=("x_n", "b_n", "a_n", "z_n", "t_n"))
def _token(
    X, B, A, Z, CONV, A_LOG, DT_BIAS, C, TAIL, S, OUT, scale, beta_max, eps, x_n, b_n, a_n, z_n, t_n, t_d, t_w,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One key head of one sequence; X, B, A, Z are the projections' rows, as far apart as x_n, b_n, a_n, z_n; t_n, t_d
    and t_w are the tail's strides."""
    n, hk = (tl.program_id(0) // HK).to(tl.int64), tl.program_id(0) % HK
    d, part = tl.arange(0, BD), tl.arange(0, 4)
    inside = (d < K)[:, None] & (d < V)[None, :]
    where = d[:, None] * V + d[None, :]
    X += n * x_n
    TAIL += n * t_n
    for i in tl.static_range(H // HK):
        h = hk * (H // HK) + i
        state = tl.load(S + (n * H + h) * (K * V) + where, inside, other=0.0)
        channel = tl.where(part < 2, (part * HK + hk) * K, 2 * HK * K + h * V)[:, None] + d[None, :]
        size = tl.where(part == 2, V, tl.where(part < 2, K, 0) if i == 0 else 0)
        live = d[None, :] < size[:, None]
        total = _taps(TAIL, CONV, channel, live, t_d, t_w, W)
        c = tl.load(C + d, d < V, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_LOG + h).to(tl.float32))
        bias = tl.load(DT_BIAS + h).to(tl.float32)
        if EARLY and i == 0:
            others_may_begin()
        a = tl.load(A + n * a_n + h).to(tl.float32) + bias
        b = tl.load(B + n * b_n + h).to(tl.float32)
        z = tl.load(Z + n * z_n + h * V + d, d < V, other=0.0).to(tl.float32)
        y = _convolved(X, TAIL, CONV, total, channel, live, t_d, t_w, W)
        unit = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
        y *= tl.where(part == 0, unit * scale, tl.where(part == 1, unit, 1.0))[:, None]
        even, odd = tl.split(tl.reshape(tl.trans(y), (BD, 2, 2)))
        first, v = tl.split(even)
        second, _ = tl.split(odd)
        if i == 0:
            q, k = first, second
        soft = tl.where(a > 20.0, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
        state *= tl.exp(-rate * soft)
        w = beta_max / (1 + tl.exp(-b)) * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * w[None, :]
        tl.store(S + (n * H + h) * (K * V) + where, state, inside)
        o = tl.sum(state * q[:, None], 0)
        o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * c * (z / (1 + tl.exp(-z)))
        tl.store(OUT + (n * H + h) * V + d, o.to(OUT.dtype.element_ty), d < V)


def gated_delta_token(
    qkv: Tensor, b: Tensor, a: Tensor, z: Tensor, weights: Sequence[Tensor], tail: Tensor, state: Tensor, heads: int,
    beta_max: float = 1.0, eps: float = 1e-6, program: tuple[int, int] = PROGRAM,
) -> Tensor:  # fmt: skip
    """``out [N, H V]`` in the dtype of `qkv`; `tail` and `state` are written over.

    Args:
        qkv: ``[N, 2 HK K + H V]``. b, a: ``[N, H]``. z: ``[N, H V]``. Rows of each may be any distance apart.
        tail: the last inputs of the convolution ``[N, 2 HK K + H V, W − 1]``, any strides.
        state: fp32 ``[N, H, K, V]``, contiguous.
        weights: as `gated_delta.Weights` has them. heads: HK. program: as `PROGRAM`.
    """
    (N, H, K, V), W = state.shape, weights[0].shape[1]
    BD, (warps, registers) = width(max(K, V)), program
    how: dict[str, Any] = options(qkv) | ({"maxnreg": registers} if registers else {})
    out = torch.empty(N, H * V, dtype=qkv.dtype, device=qkv.device)
    launch(
        _token, (N * heads,), qkv, b, a, z, *weights, tail, state, out, K**-0.5, beta_max, eps,
        *(x.stride(0) for x in (qkv, b, a, z)), *tail.stride(), H=H, HK=heads, K=K, V=V, W=W, BD=BD,
        num_warps=max(1, warps * BD // CHANNELS), tensors="any",
        **how,
    )  # fmt: skip
    return out
