"""One token a sequence: the rule's own equation on states in memory, for decoding.

    additive  S ← D S + k vᵀ        delta  S ← D S + k (β (v − (D S)ᵀ k))ᵀ        dplr  S ← D S + b (Sᵀ a)ᵀ + k vᵀ

and o = scale · Sᵀ q. A step moves every state once to the chip and once back and does little else, so its floor is a
copy of the states. `step` may write them in place, or to new memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.local import Inputs

BLOCK_V, WARPS = 32, 4
"""Columns of a state a program takes: short loads of whole rows' segments, many in flight; not yet swept."""


@triton.jit
def step_kernel(
    q, k, v, g, beta, a, b, S_in, S_out, rows, o, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, DPLR: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, BV columns. States [*, H, K, V]; INDEXED: sequence n's lies at rows[n]."""
    d = tl.arange(0, BK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    n = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    hk = n * HK + h // (H // HK)
    hv = n * H + h
    lie = tl.load(rows + n).to(tl.int64) if INDEXED else n
    at = (lie * H + h) * (K * V) + d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    S = tl.load(S_in + at, inside, other=0.0).to(tl.float32)
    y = tl.load(k + hk * K + d, d < K, other=0.0).to(tl.float32)
    x = tl.load(q + hk * K + d, d < K, other=0.0).to(tl.float32)
    w = tl.load(v + hv * V + e, e < V, other=0.0).to(tl.float32)
    if DPLR:
        seen = tl.sum(S * tl.load(a + hv * K + d, d < K, other=0.0).to(tl.float32)[:, None], 0)
    if DECAY == 1:
        S *= tl.exp(tl.load(g + hv).to(tl.float32))
    if DECAY == 2:
        S *= tl.exp(tl.load(g + hv * K + d, d < K, other=0.0).to(tl.float32))[:, None]
    if DELTA:
        w = (w - tl.sum(S * y[:, None], 0)) * tl.load(beta + hv).to(tl.float32)
    if DPLR:
        S += tl.load(b + hv * K + d, d < K, other=0.0).to(tl.float32)[:, None] * seen[None, :]
    S += y[:, None] * w[None, :]
    tl.store(S_out + at, S.to(S_out.dtype.element_ty), inside)
    tl.store(o + hv * V + e, (tl.sum(S * x[:, None], 0) * scale).to(o.dtype.element_ty), e < V)


def step(
    rule: Rule, x: Inputs, state: Tensor, scale: float, *, in_place: bool = False, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o [N, H, V], states) after one token a sequence.

    Args:
        x: the token's tensors, ``[N, heads, …]`` (no dimension of tokens).
        state: fp32 (or bf16) ``[N, H, K, V]``, contiguous; with `rows`, any number of states.
        in_place: update `state` itself and return it.
        rows: where each sequence's state lies in `state` ``[N]``; needs `in_place`.
    """
    if not state.is_contiguous():
        raise ValueError("state: expected a contiguous tensor")
    if rows is not None and not in_place:
        raise ValueError("rows: expected in_place=True, got in_place=False")
    N, H, V = x.v.shape
    HK, K = x.q.shape[1:]
    q, k, v, g, beta, a, b = (x.v if t is None else t.contiguous() for t in x)
    out = state if in_place else torch.empty_like(state)
    o = torch.empty_like(v)
    width = max(16, triton.next_power_of_2(K))
    block = min(BLOCK_V, triton.next_power_of_2(V))
    decay = {"none": 0, "scalar": 1, "diagonal": 2}[rule.decay]
    if N:
        step_kernel[(triton.cdiv(V, block), N * H)](
            q, k, v, g, beta, a, b, state, out, state if rows is None else rows, o, scale, H=H, HK=HK, K=K, V=V,
            BK=width, BV=block, DECAY=decay, DELTA=rule.write == "delta", DPLR=rule.write == "dplr",
            INDEXED=rows is not None, num_warps=WARPS,
        )  # fmt: skip
    return o, out
