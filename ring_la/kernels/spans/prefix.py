"""The scan over the spans of each piece: from every span's own map to the state that enters it.

Forward  S ← A_s S + b_s over s = first … last; the adjoint runs last … first with A_sᵀ. `entering[s]` is the state
before span s (in the direction of the scan; ENTER), `leaving[n]` the state after the last one of piece n. Without S0
the first transition is not read: the passes leave it out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.spans import table
from ring_la.kernels.spans.plan import DECAY, SpanPlan
from ring_la.kernels.spans.table import cdiv, width
from ring_la.kernels.triton.tiles import SIZES


@triton.jit
def _runs(first, n, NS, VARLEN: tl.constexpr):
    if VARLEN:
        return tl.load(first + n * 2), tl.load(first + n * 2 + 1)
    return 0, NS


@triton.jit
def _block(A, k, c, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A[k, c], or A[c, k] as such."""
    at = c[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + c[None, :]
    return tl.load(A + at, (k < K)[:, None] & (c < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(
    b_, log_a, S0, entering, leaving, first, NS, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, HAS_S0: tl.constexpr, ENTER: tl.constexpr, REVERSE: tl.constexpr, BLK: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Transitions none (DECAY 0), scalar (1: log2 A [B, NS, H]) or diagonal (2: [B, NS, H, K]), state by state."""
    e = tl.program_id(0) * BLK + tl.arange(0, BLK)
    n = tl.program_id(1)
    bh = tl.program_id(2)
    b = (bh // H).to(tl.int64)
    h = bh % H
    live = e < K * V
    lo, count = _runs(first, n, NS, VARLEN)
    own = ((b * N + n) * H + h) * K * V + e
    S = tl.zeros([BLK], tl.float32)
    if HAS_S0:
        S = tl.load(S0 + own, live, other=0.0)
    for i in range(count):
        s = lo + (count - 1 - i if REVERSE else i)
        row = (b * NS + s) * H + h
        x = tl.load(b_ + row * K * V + e, live, other=0.0)
        if ENTER:
            tl.store(entering + row * K * V + e, S, live)
        if DECAY != 0 and (HAS_S0 or i > 0):
            if DECAY == 1:
                S = S * tl.exp2(tl.load(log_a + row))
            else:
                S = S * tl.exp2(tl.load(log_a + row * K + e // V, live, other=0.0))
        S += x
    tl.store(leaving + own, S, live)


@triton.jit
def _fold(
    b_, A_, S0, entering, leaving, lo, count, b, n, h, column, NS, N, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, HAS_S0: tl.constexpr, EYE: tl.constexpr,
    ENTER: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """BV columns of one piece's state [K, W] under dense transitions; EYE: of the product of the transitions."""
    k = tl.arange(0, BK)
    j = tl.arange(0, BJ)
    v = column * BV + tl.arange(0, BV)
    live = (k < K)[:, None] & (v < W)[None, :]
    at = k[:, None] * W + v[None, :]
    own = ((b * N + n) * H + h) * K * W + at
    row = (b * NS + lo + (tl.maximum(count - 1, 0) if REVERSE else 0)) * H + h
    if HAS_S0:
        S = tl.load(S0 + own, live, other=0.0)
    elif EYE:
        S = _block(A_ + row * K * K, k, v, K, REVERSE)
        if count == 0:
            S = (k[:, None] == v[None, :]).to(tl.float32)
    else:
        S = tl.load(b_ + row * K * W + at, live & (count > 0), other=0.0)
        if ENTER:
            tl.store(entering + row * K * W + at, tl.zeros([BK, BV], tl.float32), live & (count > 0))
    for i in range(0 if HAS_S0 else 1, count):
        row = (b * NS + lo + (count - 1 - i if REVERSE else i)) * H + h
        if ENTER or BJ < BK:
            tl.store(entering + row * K * W + at, S, live)
        if EYE:
            acc = tl.zeros([BK, BV], tl.float32)
        else:
            acc = tl.load(b_ + row * K * W + at, live, other=0.0)
        if BJ == BK:
            S = tl.dot(_block(A_ + row * K * K, k, k, K, REVERSE), S, acc, input_precision="tf32x3")
        else:
            tl.debug_barrier()
            for m in range(0, K, BJ):
                c = m + j
                some = (c < K)[:, None] & (v < W)[None, :]
                part = tl.load(entering + row * K * W + c[:, None] * W + v[None, :], some, other=0.0)
                acc = tl.dot(_block(A_ + row * K * K, k, c, K, REVERSE), part, acc, input_precision="tf32x3")
            S = acc
    tl.store(leaving + own, S, live)


@triton.jit(do_not_specialize=SIZES)
def prefix_dense_kernel(
    b_, A_, S0, entering, leaving, before, passed, first, NS, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, HAS_S0: tl.constexpr, ENTER: tl.constexpr,
    STATES: tl.constexpr, MAPS: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Dense transitions A [B, NS, H, K, K]. Where A is too large for one tile (BJ < BK), its columns meet the state BJ
    at a time, from `entering`.

    STATES: the scan itself. MAPS: the product of each piece's transitions, by programs of their own, in `passed` [B, N,
    H, K, K]; `before` [B, NS, H, K, K] is what `entering` is to states.
    """
    NV: tl.constexpr = (V + BV - 1) // BV if STATES else 0
    column = tl.program_id(0)
    n = tl.program_id(1)
    b = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    lo, count = _runs(first, n, NS, VARLEN)
    if STATES:
        if column < NV:
            _fold(
                b_, A_, S0, entering, leaving, lo, count, b, n, h, column, NS, N, H, K, V, BK, BJ, BV, HAS_S0, False,
                ENTER, REVERSE,
            )  # fmt: skip
    if MAPS:
        if column >= NV:
            _fold(
                A_, A_, A_, before, passed, lo, count, b, n, h, column - NV, NS, N, H, K, K, BK, BJ, BV, False, True,
                ENTER, REVERSE,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def through_kernel(log_a, out, first, NS, N, WIDTH, BLK: tl.constexpr, VARLEN: tl.constexpr):
    """The product of each piece's transitions, scalar or diagonal: log2 A [B, NS, WIDTH] to A [B, N, WIDTH]."""
    e = tl.program_id(0) * BLK + tl.arange(0, BLK)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    lo, count = _runs(first, n, NS, VARLEN)
    total = tl.zeros([BLK], tl.float32)
    for i in range(count):
        total += tl.load(log_a + (b * NS + lo + i) * WIDTH + e, e < WIDTH, other=0.0)
    tl.store(out + (b * N + n) * WIDTH + e, tl.exp2(total), e < WIDTH)


def prefix(
    plan: SpanPlan, maps: SpanMaps, S0: Tensor | None, reverse: bool, enter: bool = True
) -> tuple[Tensor, Tensor]:
    """The states entering the spans (not `enter`: nothing to read), and those leaving the pieces."""
    _, _, H, _, K, V = plan.sizes
    entering = torch.empty_like(maps.own) if enter or in_parts(plan) else maps.own
    leaving, spans, block = plan.states_of_pieces(), plan.spans, 1024
    if plan.dense:
        prefix_dense(plan, maps, S0, DensePrefix(leaving, entering=entering), reverse, enter)
        return entering, leaving
    launch(
        prefix_kernel, (cdiv(K * V, block), spans.pieces, plan.rows),
        *filled(maps.own, maps.transition, S0, entering, leaving), spans.first, spans.count, spans.pieces, H=H, K=K,
        V=V, DECAY=DECAY[plan.rule.decay], HAS_S0=S0 is not None, ENTER=enter, REVERSE=reverse, BLK=block,
        VARLEN=plan.packed, num_warps=4,
    )  # fmt: skip
    return entering, leaving


class DensePrefix(NamedTuple):
    """What `prefix_dense_kernel` fills, as far as it is there: the states leaving the pieces, the pieces' transitions;
    states and transitions before each span, which transitions that are read in parts meet there."""

    leaving: Tensor | None = None
    transitions: Tensor | None = None
    entering: Tensor | None = None
    before: Tensor | None = None


def prefix_dense(
    plan: SpanPlan, maps: SpanMaps, S0: Tensor | None, out: DensePrefix, reverse: bool = False, enter: bool = False
) -> None:
    """`prefix_dense_kernel` for states or transitions or both."""
    _, _, H, _, K, V = plan.sizes
    states, products = out.leaving is not None, out.transitions is not None
    spans = plan.spans
    how = plan.fitting((table.PREFIX_MAPS if products else table.PREFIX)[max(64, width(K))])
    launch(
        prefix_dense_kernel, (cdiv(V, how.block) * states + cdiv(K, how.block) * products, spans.pieces, plan.rows),
        *filled(maps.own, maps.transition, S0, out.entering, out.leaving, out.before, out.transitions), spans.first,
        spans.count, spans.pieces, H=H, K=K, V=V, HAS_S0=S0 is not None, ENTER=enter, STATES=states, MAPS=products,
        REVERSE=reverse, VARLEN=plan.packed, BJ=_part(plan), BK=width(K), BV=how.block, **how.options,
    )  # fmt: skip


def prefix_and_transitions(plan: SpanPlan, maps: SpanMaps, S0: Tensor | None) -> tuple[Tensor, Tensor]:
    """Under dense transitions, the states leaving the pieces and the pieces' transitions, in one launch."""
    leaving, transitions = plan.states_of_pieces(), plan.maps_of_pieces()
    entering, before = (torch.empty_like(x) if in_parts(plan) else None for x in (maps.own, maps.transition))
    prefix_dense(plan, maps, S0, DensePrefix(leaving, transitions, entering, before))
    return leaving, transitions


def transitions_of_pieces(plan: SpanPlan, maps: SpanMaps) -> Tensor | None:
    """The product of each piece's transitions, from its spans'; None for the identity."""
    transition, spans = maps.transition, plan.spans
    if transition is None:
        return None
    if plan.dense:
        before, out = torch.empty_like(transition) if in_parts(plan) else None, plan.maps_of_pieces()
        prefix_dense(plan, maps, None, DensePrefix(transitions=out, before=before))
        return out
    out = plan.new(plan.sizes.B, spans.pieces, *transition.shape[2:])
    channels, block = math.prod(transition.shape[2:]), 256
    launch(
        through_kernel, (cdiv(channels, block), spans.pieces, plan.sizes.B), transition, out, spans.first, spans.count,
        spans.pieces, channels, BLK=block, VARLEN=plan.packed, num_warps=4,
    )  # fmt: skip
    return out


def in_parts(plan: SpanPlan) -> bool:
    """Whether a dense transition meets the state in parts, which it finds in `entering`."""
    return plan.dense and _part(plan) < width(plan.sizes.K)


def _part(plan: SpanPlan) -> int:
    """Columns of a dense transition that a scan reads at a time: all up to 128."""
    return width(plan.sizes.K) if width(plan.sizes.K) <= 128 else 32
