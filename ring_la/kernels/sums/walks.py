"""Walks over the tokens of spans, and over the spans of pieces, for heads of one number: kernels and their launches.

A program has some channels of one span (or piece) and goes through it a tile of tokens at a time; what is between is a
scan within the tile. A tile is ``[tokens, channels]``, with channels next to each other in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv, power_of_2
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.triton.tiles import SIZES, entry, span

TOKENS, CHANNELS, WARPS = 64, 64, 4
"""Tile of a program: the fastest of `python -m benchmarks.tuning.sums` on an H200."""
SPAN, LEAST, PROGRAMS = 512, 64, 1024
"""Tokens of a span at most and at least, and programs wanted in a walk."""


def span_length(B: int, T: int, C: int) -> int:
    """Tokens of a span: few enough for `PROGRAMS` programs, within bounds; a multiple of a tile's."""
    wanted = max(1, PROGRAMS // (B * cdiv(C, CHANNELS)))
    return max(min(LEAST, SPAN), min(SPAN, power_of_2(cdiv(T, wanted))))


@triton.jit
def joined(a, x, b, y):
    """``S ↦ b (a S + x) + y``."""
    return a * b, b * x + y


@triton.jit
def columns(C: tl.constexpr, BC: tl.constexpr):
    """(number of the span, row of the batch, channels, which of them there are) of a program."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    return tl.program_id(0) // blocks, tl.program_id(1), c, c < C


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x, g, S0, out, ends, totals, table, T, NS, LENGTH, scale, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    VARLEN: tl.constexpr, GATED: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Of each token scale · S_t, or (KEPT) what is left of the state before; of each span the state after it, and its
    whole log-decay."""
    s, row, c, inside = columns(C, BC)
    first, last, _, _, _, _ = span(table, s, T, LENGTH, BT, VARLEN)
    here = entry(row, s, 0, NS, 1) * C + c
    S = tl.zeros([BC], tl.float32)
    if STATES:
        S += tl.load(S0 + here, inside, other=0.0)
    whole = tl.zeros([BC], tl.float32)
    at = tl.arange(0, BT)
    for t in range(first, last, BT):
        i = t + at
        live = (i < last)[:, None] & inside[None, :]
        place = entry(row, i, 0, T, 1)[:, None] * C + c[None, :]
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
    tl.store(ends + here, S, inside)
    tl.store(totals + here, whole, inside)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    do, g, kept, G_end, dx, dg, entering, table, T, NS, LENGTH, scale, C: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, VARLEN: tl.constexpr, GATED: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The same from right to left: dv and dg of each token, and the gradient of the state that enters each span."""
    s, row, c, inside = columns(C, BC)
    first, last, _, _, _, _ = span(table, s, T, LENGTH, BT, VARLEN)
    here = entry(row, s, 0, NS, 1) * C + c
    G = tl.zeros([BC], tl.float32)
    if STATES:
        G += tl.load(G_end + here, inside, other=0.0)
    at = tl.arange(0, BT)
    for step in range(0, last - first, BT):
        i = last - 1 - step - at  # rows from right to left: no scan that turns round
        live = (i >= first)[:, None] & inside[None, :]
        place = entry(row, i, 0, T, 1)[:, None] * C + c[None, :]
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
        G *= tl.exp(tl.load(g + entry(row, first, 0, T, 1) * C + c, some, other=0.0).to(tl.float32))
    tl.store(entering + here, G, inside)


@triton.jit(do_not_specialize=SIZES)
def spans_kernel(
    own, totals, S0, before, ends, whole, runs, NS, N, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    VARLEN: tl.constexpr, STATES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Over the spans of a piece, from left to right or (REVERSE) back: what reaches each, what leaves the piece, and
    the piece's whole log-decay."""
    n, row, c, inside = columns(C, BC)
    first, count = 0, NS
    if VARLEN:
        first, count = tl.load(runs + n * 2), tl.load(runs + n * 2 + 1)
    piece = entry(row, n, 0, N, 1) * C + c
    S = tl.zeros([BC], tl.float32)
    if STATES:
        S += tl.load(S0 + piece, inside, other=0.0)
    sums = tl.zeros([BC], tl.float32)
    at = tl.arange(0, BT)
    for t in range(0, count, BT):
        i = t + at
        live = (i < count)[:, None] & inside[None, :]
        s = first + (count - 1 - i if REVERSE else i)
        place = entry(row, s, 0, NS, 1)[:, None] * C + c[None, :]
        gate = tl.load(totals + place, live, other=0.0)
        sums += tl.sum(gate, 0)
        decay, added = tl.associative_scan((tl.exp(gate), tl.load(own + place, live, other=0.0)), 0, joined)
        state = decay * S[None, :] + added
        tl.store(before + place, tl.zeros([BT, BC], tl.float32) + S[None, :], live & (at == 0)[:, None])
        step = -C if REVERSE else C  # what a span leaves is what reaches the next
        tl.store(before + place + step, state, live & (i < count - 1)[:, None] & (at < BT - 1)[:, None])
        S = tl.sum(tl.where((at == BT - 1)[:, None], state, 0.0), 0)
    tl.store(ends + piece, S, inside)
    tl.store(whole + piece, sums, inside)


class SumsWalk(NamedTuple):
    """What tokens (or spans) give, None where nobody asked; the states that leave, and the log-decays."""

    out: Tensor | None
    ends: Tensor
    totals: Tensor


def forwards(
    x: Tensor, g: Tensor | None, S0: Tensor | None, runs: Runs, scale: float, *, write: bool = True, kept: bool = False
) -> SumsWalk:
    """One walk over the spans of ``x [B, T, C]``, given what enters them ``[B, NS, C]``; `kept` in fp32."""
    B, T, C = x.shape
    NS, table = runs.count, runs.table
    out = torch.empty(x.shape, dtype=torch.float32 if kept else x.dtype, device=x.device) if write else None
    ends, totals = (torch.empty(B, NS, C, device=x.device) for _ in range(2))
    launch(
        forward_kernel, (NS * cdiv(C, CHANNELS), B), x, *filled(g, S0, out, by=ends), ends, totals,
        *filled(table, by=ends), T, NS, runs.length, scale, C=C, BT=TOKENS, BC=CHANNELS, VARLEN=table is not None,
        GATED=g is not None, STATES=S0 is not None, WRITE=write, KEPT=kept, num_warps=WARPS, tensors="any",
    )  # fmt: skip
    return SumsWalk(out, ends, totals)


class WalkBack(NamedTuple):
    """Gradients of the tokens' writes and log-decays, None where nobody asked; of the states that enter."""

    dx: Tensor | None
    dg: Tensor | None
    entering: Tensor


def backwards(
    do: Tensor, g: Tensor | None, kept: Tensor | None, G: Tensor | None, runs: Runs, scale: float,
    dtype: torch.dtype | None,
) -> WalkBack:  # fmt: skip
    """One walk back over the spans of ``do [B, T, C]``, given what comes from behind them: dx in `dtype` (None: nobody
    asks), dg where `kept` is."""
    B, T, C = do.shape
    NS, table = runs.count, runs.table
    dx = None if dtype is None else torch.empty(do.shape, dtype=dtype, device=do.device)
    dg = None if dx is None or kept is None or g is None else torch.empty_like(g)
    entering = torch.empty(B, NS, C, device=do.device)
    launch(
        backward_kernel, (NS * cdiv(C, CHANNELS), B), do, *filled(g, kept, G, dx, dg, by=entering), entering,
        *filled(table, by=entering), T, NS, runs.length, scale, C=C, BT=TOKENS, BC=CHANNELS, VARLEN=table is not None,
        GATED=g is not None, STATES=G is not None, WRITE=dx is not None, GATE=dg is not None, num_warps=WARPS,
        tensors="any",
    )  # fmt: skip
    return WalkBack(dx, dg, entering)


def over_spans(own: Tensor, totals: Tensor, S0: Tensor | None, runs: Runs, *, reverse: bool = False) -> SumsWalk:
    """What reaches each span ``[B, NS, C]`` and leaves each piece ``[B, N, C]``, given what reaches the pieces."""
    B, NS, C = own.shape
    N = runs.pieces
    before = torch.empty_like(own)
    ends, whole = (torch.empty(B, N, C, device=own.device) for _ in range(2))
    launch(
        spans_kernel, (N * cdiv(C, CHANNELS), B), own, totals, *filled(S0, by=ends), before, ends, whole,
        *filled(runs.first, by=ends), NS, N, C=C, BT=TOKENS, BC=CHANNELS, VARLEN=runs.first is not None,
        STATES=S0 is not None, REVERSE=reverse, num_warps=WARPS, tensors="any",
    )  # fmt: skip
    return SumsWalk(before, ends, whole)
