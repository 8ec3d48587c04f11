"""One rank's tokens under the rule "sum": every head is one number, ``S ← e^g S + v``, ``o = scale · S``.

Nothing is multiplied with a matrix: a program walks over the tokens of a piece for some channels, a tile at a time, and
what is between is a scan within the tile. A piece of its own is cut into spans, which are summed up first; the states
that enter them are the same sum over spans.

    G_t = scale · do_t + e^{g_{t+1}} G_{t+1},      dv_t = G_t,      dg_t = G_t · e^{g_t} S_{t−1}
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import (
    PLAIN,
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Output,
    OutputUse,
    Summary,
)
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.spans.table import cdiv

TOKENS, CHANNELS, WARPS = 32, 32, 4
"""Tile of a program."""
SPAN, ALL = 512, 2**20
"""Tokens of a span; of a piece that is one."""


def unsupported(inputs: Inputs) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    v, g = inputs.v, inputs.g
    if any(x is not None and x.dtype not in (torch.float32, torch.bfloat16, torch.float16) for x in (v, g)):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    return "no tokens" if v.numel() == 0 else ""


@triton.jit
def joined(a, x, b, y):
    """``S ↦ b (a S + x) + y``."""
    return a * b, b * x + y


@triton.jit(do_not_specialize=("T", "N"))
def sum_kernel(
    x, g, S0, out, ends, totals, cu, T, N, scale, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    SPAN: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Pieces ``[cu[n], cu[n+1])`` (or spans of SPAN tokens) of C channels: scale · S_t, or (KEPT) what is left of the
    state before; the state after each piece, and its whole log-decay."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    n = tl.program_id(0) // blocks
    row = tl.program_id(1).to(tl.int64)
    inside = c < C
    first, last = n * SPAN, tl.minimum(n * SPAN + SPAN, T)
    if PACKED:
        first, last = tl.load(cu + n), tl.load(cu + n + 1)
    piece = (row * N + n) * C + c
    S = tl.zeros([BC], tl.float32)
    if STATES:
        S += tl.load(S0 + piece, inside, other=0.0)
    whole = tl.zeros([BC], tl.float32)
    at = tl.arange(0, BT)
    for t in range(first, last, BT):
        i = t + at
        live = (i < last)[:, None] & inside[None, :]
        place = (row * T + i.to(tl.int64))[:, None] * C + c[None, :]
        v = tl.load(x + place, live, other=0.0).to(tl.float32)
        gate = tl.zeros([BT, BC], tl.float32)
        if GATED:
            gate += tl.load(g + place, live, other=0.0).to(tl.float32)
        whole += tl.sum(gate, 0)
        decay, own = tl.associative_scan((tl.exp(gate), v), 0, joined)
        state = decay * S[None, :] + own
        if WRITE:
            given = state - v if KEPT else scale * state
            tl.store(out + place, given.to(out.dtype.element_ty), live)
        S = tl.sum(tl.where((at == BT - 1)[:, None], state, 0.0), 0)
    tl.store(ends + piece, S, inside)
    tl.store(totals + piece, whole, inside)


@triton.jit(do_not_specialize=("T", "N"))
def back_kernel(
    do, g, kept, G_end, dx, dg, entering, cu, T, N, scale, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    SPAN: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The same from right to left: dv and dg of each token, and the gradient of the state that enters each piece."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    n = tl.program_id(0) // blocks
    row = tl.program_id(1).to(tl.int64)
    inside = c < C
    first, last = n * SPAN, tl.minimum(n * SPAN + SPAN, T)
    if PACKED:
        first, last = tl.load(cu + n), tl.load(cu + n + 1)
    piece = (row * N + n) * C + c
    G = tl.zeros([BC], tl.float32)
    if STATES:
        G += tl.load(G_end + piece, inside, other=0.0)
    at = tl.arange(0, BT)
    for step in range(0, last - first, BT):
        i = last - 1 - step - at
        live = (i >= first)[:, None] & inside[None, :]
        place = (row * T + i.to(tl.int64))[:, None] * C + c[None, :]
        d = scale * tl.load(do + place, live, other=0.0).to(tl.float32)
        after = tl.zeros([BT, BC], tl.float32)
        if GATED:  # of the token after; none after the last
            after += tl.load(g + place + C, live & (i < last - 1)[:, None], other=0.0).to(tl.float32)
        decay, own = tl.associative_scan((tl.exp(after), d), 0, joined)
        grad = decay * G[None, :] + own
        if WRITE:
            tl.store(dx + place, grad.to(dx.dtype.element_ty), live)
            if GATE:
                left = tl.load(kept + place, live, other=0.0).to(tl.float32)
                tl.store(dg + place, (grad * left).to(dg.dtype.element_ty), live)
        G = tl.sum(tl.where((at == BT - 1)[:, None], grad, 0.0), 0)
    if GATED:
        some = inside & (last > first)
        G *= tl.exp(tl.load(g + (row * T + first.to(tl.int64)) * C + c, some, other=0.0).to(tl.float32))
    tl.store(entering + piece, G, inside)


class Forwards(NamedTuple):
    """Of a walk: what tokens give (None where it is not written), the states after the pieces, their log-decays."""

    out: Tensor | None
    ends: Tensor
    totals: Tensor


class GatedSums:
    """See `protocol.Local`. States are ``[B, N, H, 1, 1]``."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse = PLAIN) -> None:
        self.rule, self.scale, self.cu, self.ones = rule, float(scale), cu, inputs[:2]
        self.v = inputs.v[..., 0].contiguous()
        self.g = None if inputs.g is None else inputs.g.contiguous()

    def summary(self, S0: Tensor | None, through: bool, known: Summary[None] | None = None) -> Summary[None]:
        _, ends, totals = self._forward(S0, write=False)
        A = totals.exp() if through and self.rule.decay == "scalar" else None
        return Summary(A, _wide(ends), None)

    def prepare(self, summary: Summary[None]) -> Summary[None]:
        return summary

    def output(self, S0: Tensor | None, summary: Summary[None] | None = None, border: Border | None = None) -> Output:
        out, ends, _ = self._forward(S0)
        return Output(out[..., None], _wide(ends))

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[None]:
        _, _, entering = self._backward(backward, dS_end, write=False)
        return Adjoint(_wide(entering), None)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[None]) -> Adjoint[None]:
        return adjoint

    def gradients(
        self, backward: Backward, dS_end: Tensor | None, adjoint: Adjoint[None] | None = None,
        border: Border | None = None,
    ) -> InputGradients:  # fmt: skip
        dv, dg, entering = self._backward(backward, dS_end)
        zeros = (x.new_zeros(x.shape) for x in self.ones)  # q and k are ones
        return InputGradients(Inputs(*zeros, dv[..., None], dg), _wide(entering))  # type: ignore[call-arg]

    # -- walks ---------------------------------------------------------------------------------------------

    def _forward(self, S0: Tensor | None, write: bool = True, kept: bool = False) -> Forwards:
        S0 = None if S0 is None else S0[..., 0, 0].contiguous()
        if self.cu is not None or self.v.shape[1] <= SPAN:
            return forwards(self.v, self.g, S0, self.cu, self.scale, SPAN, write, kept)
        _, ends, totals = forwards(self.v, self.g, None, None, self.scale, SPAN, False, False)
        spans = forwards(ends, totals, S0, None, 1.0, ALL, True, False)
        if not write:
            return spans._replace(totals=totals.sum(1, keepdim=True))
        start = torch.zeros_like(ends[:, :1]) if S0 is None else S0
        entering = torch.cat([start, spans.out[:, :-1]], 1)
        out, _, _ = forwards(self.v, self.g, entering, None, self.scale, SPAN, True, kept)
        return Forwards(out, spans.ends, spans.totals)

    def _backward(
        self, backward: Backward, dS_end: Tensor | None, write: bool = True
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        do = backward.do[..., 0].contiguous()
        G = None if dS_end is None else dS_end[..., 0, 0].contiguous()
        kept = self._forward(backward.S0, kept=True).out if write and self.g is not None else None
        args = do, self.g, kept
        if self.cu is not None or do.shape[1] <= SPAN:
            return backwards(*args, G, self.v, self.cu, self.scale, SPAN, write)
        _, _, own = backwards(*args, None, self.v, None, self.scale, SPAN, False)
        _, _, totals = forwards(self.v, self.g, None, None, self.scale, SPAN, False, False)
        later = torch.cat([own[:, 1:], torch.zeros_like(own[:, :1])], 1)
        leaving, _, first = backwards(later, totals, None, G, later, None, 1.0, ALL, True)
        if not write:
            return None, None, own[:, :1] + first
        dv, dg, entering = backwards(*args, leaving, self.v, None, self.scale, SPAN, True)
        return dv, dg, entering[:, :1]


def _wide(states: Tensor) -> Tensor:
    return states[..., None, None]


def forwards(
    x: Tensor, g: Tensor | None, S0: Tensor | None, cu: Tensor | None, scale: float, span: int, write: bool, kept: bool
) -> Forwards:
    """One walk over ``x [B, T, C]``, in pieces or in spans."""
    B, T, C = x.shape
    N = cdiv(T, span) if cu is None else cu.numel() - 1
    out = torch.empty(x.shape, dtype=torch.float32 if kept else x.dtype, device=x.device) if write else None
    ends, totals = (torch.empty(B, N, C, device=x.device) for _ in range(2))
    launch(
        sum_kernel, (N * cdiv(C, CHANNELS), B), x, x if g is None else g, ends if S0 is None else S0.float(),
        ends if out is None else out, ends, totals, x if cu is None else cu, T, N, scale, C=C, BT=TOKENS, BC=CHANNELS,
        SPAN=span, PACKED=cu is not None, GATED=g is not None, STATES=S0 is not None, WRITE=write, KEPT=kept,
        num_warps=WARPS, tensors="any",
    )  # fmt: skip
    return Forwards(out, ends, totals)


def backwards(
    do: Tensor, g: Tensor | None, kept: Tensor | None, G: Tensor | None, like: Tensor, cu: Tensor | None, scale: float,
    span: int, write: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """One walk back over ``do [B, T, C]``: dv in the dtype of `like`, dg (where `kept` is), the entering gradients."""
    B, T, C = do.shape
    N = cdiv(T, span) if cu is None else cu.numel() - 1
    dx = torch.empty(do.shape, dtype=like.dtype, device=do.device) if write else None
    dg = torch.empty(do.shape, dtype=g.dtype, device=do.device) if write and kept is not None else None
    entering = torch.empty(B, N, C, device=do.device)
    given = [entering if t is None else t for t in (kept, None if G is None else G.float(), dx, dg)]
    launch(
        back_kernel, (N * cdiv(C, CHANNELS), B), do, do if g is None else g, *given, entering, do if cu is None else cu,
        T, N, scale, C=C, BT=TOKENS, BC=CHANNELS, SPAN=span, PACKED=cu is not None, GATED=g is not None,
        STATES=G is not None, WRITE=write, GATE=dg is not None, num_warps=WARPS, tensors="any",
    )  # fmt: skip
    return dx, dg, entering
