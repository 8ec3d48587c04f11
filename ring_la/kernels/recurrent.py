"""The recurrent mode: the rule's own equation token by token, for decoding and very short sequences.

    additive  S ← D S + k vᵀ        delta  S ← D S + k (β (v − (D S)ᵀ k))ᵀ        dplr  S ← D S + b (Sᵀ a)ᵀ + k vᵀ
                               erase  S ← D S + k (β (v − (D S)ᵀ a))ᵀ

and o = scale · Sᵀ q. A program holds a head's state, or some of its columns, from a piece's first token to its last: it
moves every state once to the chip and once back and does little else for one token, so the floor is a copy of the
states. They may be written in place, or to new memory. What a token reads of the state after it is found from the state
before it, (D S + k wᵀ)ᵀ q = Sᵀ (D q) + (k·q) w, so that no sum waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Generic

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import (
    Adjoint,
    Back,
    Backward,
    Border,
    Forward,
    InputGradients,
    Inputs,
    Local,
    Output,
    Summary,
)
from ring_la.kernels.runtime.contract import Promise
from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.runtime.replayed_function import replayed_call
from ring_la.kernels.runtime.triton_version import ALIGNMENT
from ring_la.kernels.sizes import cdiv, power_of_2, width
from ring_la.kernels.spans.plan import DECAY

TILE = {"additive": (64, 4), "delta": (64, 4), "erase": (64, 4), "dplr": (32, 2)}
"""By the rule's write, columns of a state a program takes and its warps: the best of 16 to 64 and 2 to 8 for 64
sequences of 32 heads, K = V = 128, on an H200 (benchmarks.decode)."""


def unsupported(inputs: Inputs) -> str:
    """Why this kernel cannot take a call, or an empty string. Every rule is taken, at any number of tokens."""
    q, v = inputs.q, inputs.v
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if any(x is not None and x.dtype == torch.float64 for x in inputs):
        return "a tensor is fp64"
    if not (1 <= q.shape[-1] <= 256 and 1 <= v.shape[-1] <= 256):
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}: the kernels take 1 to 256"
    return ""


@triton.jit
def advance(
    S, q, k, v, g, beta, a, b, o, i, h, e, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, ERASE: tl.constexpr, DPLR: tl.constexpr,
):  # fmt: skip
    """The columns `e` of head h's state after token i of all B · T, whose output is stored."""
    d = tl.arange(0, BK)
    hk = i * HK + h // (H // HK)
    hv = i * H + h
    y = tl.load(k + hk * K + d, d < K, other=0.0).to(tl.float32)
    x = tl.load(q + hk * K + d, d < K, other=0.0).to(tl.float32)
    w = tl.load(v + hv * V + e, e < V, other=0.0).to(tl.float32)
    if DECAY == 0:
        kept = tl.full([BK], 1.0, tl.float32)
    elif DECAY == 1:
        kept = tl.zeros([BK], tl.float32) + tl.exp(tl.load(g + hv).to(tl.float32))
    else:
        kept = tl.exp(tl.load(g + hv * K + d, d < K, other=0.0).to(tl.float32))
    read = tl.sum(S * (kept * x)[:, None], 0)
    if DELTA:
        z = tl.load(a + hv * K + d, d < K, other=0.0).to(tl.float32) if ERASE else y
        w = (w - tl.sum(S * (kept * z)[:, None], 0)) * tl.load(beta + hv).to(tl.float32)
    if DPLR:
        seen = tl.sum(S * tl.load(a + hv * K + d, d < K, other=0.0).to(tl.float32)[:, None], 0)
    if DECAY:
        S *= kept[:, None]
    if DPLR:
        z = tl.load(b + hv * K + d, d < K, other=0.0).to(tl.float32)
        S += z[:, None] * seen[None, :]
        read += tl.sum(z * x, 0) * seen
    S += y[:, None] * w[None, :]
    read += tl.sum(y * x, 0) * w
    tl.store(o + hv * V + e, (read * scale).to(o.dtype.element_ty), e < V)
    return S


@triton.jit(do_not_specialize=("T", "N"))
def tokens_kernel(
    q, k, v, g, beta, a, b, S_in, S_out, rows, cu, o, scale, T, N, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr,
    ERASE: tl.constexpr, DPLR: tl.constexpr, HAS_STATE: tl.constexpr, INDEXED: tl.constexpr, PACKED: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """One head of one piece, BV columns. States [B, N, H, K, V]; INDEXED: that of the n-th piece lies at rows[n].

    PACKED: the N pieces of each batch row begin at cu; else a row is one piece. SINGLE: of one token, without a loop.
    """
    d = tl.arange(0, BK)
    columns: tl.constexpr = (V + BV - 1) // BV
    e = tl.program_id(0) % columns * BV + tl.arange(0, BV)
    h = tl.program_id(0) // columns % H
    piece = (tl.program_id(0) // (columns * H)).to(tl.int64)
    lie = tl.load(rows + piece).to(tl.int64) if INDEXED else piece
    at = (lie * H + h) * (K * V) + d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    if HAS_STATE:
        S = tl.load(S_in + at, inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    if SINGLE:
        S = advance(S, q, k, v, g, beta, a, b, o, piece, h, e, scale, H, HK, K, V, BK, DECAY, DELTA, ERASE, DPLR)
    else:
        row = piece // N
        begin = tl.load(cu + piece % N).to(tl.int32) if PACKED else 0
        end = tl.load(cu + piece % N + 1).to(tl.int32) if PACKED else T
        for t in range(begin, end):
            S = advance(
                S, q, k, v, g, beta, a, b, o, row * T + t, h, e, scale, H, HK, K, V, BK, DECAY, DELTA, ERASE, DPLR
            )  # fmt: skip
    tl.store(S_out + at, S.to(S_out.dtype.element_ty), inside)


def run(
    rule: Rule,
    x: Inputs,
    state: Tensor | None,
    scale: float,
    *,
    cu: Tensor | None = None,
    into: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V], the states leaving the pieces [B, N, H, K, V]).

    Args:
        x: the tokens, ``[B, T, heads, …]``.
        state: those entering, fp32 (or bf16), contiguous; None: zeros. With `rows`, any number of states.
        cu: offsets ``[N+1]`` of the pieces of each batch row; None: one.
        into: where the states go, which may be `state` itself; None: new memory.
        rows: where each piece's state lies in `state` and `into` ``[B·N]``.
    """
    B, T, H, V = x.v.shape
    HK, K = x.q.shape[2:]
    N = 1 if cu is None else cu.shape[0] - 1
    x = Inputs(*(None if t is None else aligned(t) for t in x))
    if into is None:
        into = x.v.new_empty(B, N, H, K, V, dtype=torch.float32 if state is None else state.dtype)
    o = torch.empty_like(x.v)
    block, warps = TILE[rule.write]
    block = min(block, power_of_2(V))
    programs = B * N * H * cdiv(V, block)
    if programs:
        given = state, into, rows, cu
        # states are written where they lie, which may be an odd address
        promise: Promise = "contiguous" if all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in given) else "any"
        launch(
            tokens_kernel, (programs,), *filled(*x, *given), o, scale, T, N, H=H, HK=HK, K=K, V=V,
            BK=width(K), BV=block, DECAY=DECAY[rule.decay], DELTA=rule.write in ("delta", "erase"),
            ERASE=rule.write == "erase", DPLR=rule.write == "dplr",
            HAS_STATE=state is not None, INDEXED=rows is not None, PACKED=cu is not None,
            SINGLE=cu is None and T == 1, num_warps=warps, tensors=promise,
        )  # fmt: skip
    return o, into


def _run(*arguments) -> tuple[Tensor, Tensor]:
    """`run`, its tensors first: those of the tokens, the state and the offsets."""
    *x, state, cu, rule, scale, in_place = arguments
    return run(rule, Inputs(*x), state, scale, cu=cu, into=state if in_place else None)


class TritonTokens(Generic[Forward, Back]):
    """The `Local` of the recurrent mode: the output token by token. Gradients and summaries are those of a chunked
    backend, which computes the same function.

    Args:
        chunked: makes that backend, when it is asked for.
        in_place: the states that leave may be written over those that enter.
    """

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(
        self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float,
        chunked: Callable[[], Local[Forward, Back]], in_place: bool,
    ) -> None:  # fmt: skip
        self.rule, self.cu, self.scale, self.in_place = rule, cu, float(scale), in_place
        self.inputs, self._make = inputs, chunked

    @cached_property
    def chunked(self) -> Local[Forward, Back]:
        return self._make()

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Forward] | None = None) -> Summary[Forward]:
        return self.chunked.summary(S0, through, known)

    def prepare(self, summary: Summary[Forward]) -> Summary[Forward]:
        """As it is: a token needs the state before it."""
        return summary

    def output(
        self, S0: Tensor | None, summary: Summary[Forward] | None = None, border: Border | None = None
    ) -> Output:
        assert border is None  # see `crosses`
        state = None if S0 is None else S0.detach().to(torch.float32).contiguous()
        in_place = self.in_place and state is not None and state.data_ptr() == S0.data_ptr()
        if in_place and state.data_ptr() % ALIGNMENT:  # written where it lies
            return Output(*run(self.rule, self.inputs, state, self.scale, cu=self.cu, into=state))
        return Output(*replayed_call(_run, (*self.inputs, state, self.cu), self.rule, self.scale, in_place))

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Back]:
        return self.chunked.adjoint(backward, dS_end)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Back]) -> Adjoint[Back]:
        return self.chunked.prepare_gradients(backward, adjoint)

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Back] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        assert border is None
        return self.chunked.gradients(backward, dS_end, adjoint)
