"""The scan over the spans of each piece: from every span's own map to the state that enters it.

Forward  S ← A_s S + b_s over s = first … last; the adjoint runs last … first with A_sᵀ. `entering[s]` is the state
before span s (in the direction of the scan; ENTER), `leaving[n]` the state after the last one of piece n. Without S0
the first transition is not read: the passes leave it out.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.dense import DensePrefix, in_parts, prefix_dense, room_for_transitions, spans_of
from ring_la.kernels.spans.plan import DECAY, SpanPlan
from ring_la.kernels.triton.tiles import SIZES


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
    lo, count = spans_of(first, n, NS, VARLEN)
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


@triton.jit(do_not_specialize=SIZES)
def through_kernel(log_a, out, first, NS, N, WIDTH, BLK: tl.constexpr, VARLEN: tl.constexpr):
    """The product of each piece's transitions, scalar or diagonal: log2 A [B, NS, WIDTH] to A [B, N, WIDTH]."""
    e = tl.program_id(0) * BLK + tl.arange(0, BLK)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    lo, count = spans_of(first, n, NS, VARLEN)
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


def prefix_and_transitions(plan: SpanPlan, maps: SpanMaps, S0: Tensor | None) -> tuple[Tensor, Tensor]:
    """Under dense transitions, the states leaving the pieces and the pieces' transitions, in one launch."""
    leaving, transitions = plan.states_of_pieces(), room_for_transitions(plan)
    entering, before = (torch.empty_like(x) if in_parts(plan) else None for x in (maps.own, maps.transition))
    prefix_dense(plan, maps, S0, DensePrefix(leaving, transitions, entering, before))
    return leaving, transitions


def dense_transitions_of_pieces(plan: SpanPlan, maps: SpanMaps) -> Tensor:
    """The pieces' dense transitions alone."""
    out = room_for_transitions(plan)
    prefix_dense(
        plan,
        maps,
        None,
        DensePrefix(transitions=out, before=torch.empty_like(maps.transition) if in_parts(plan) else None),
    )
    return out


def transitions_of_pieces(plan: SpanPlan, maps: SpanMaps) -> Tensor | None:
    """The product of each piece's transitions, from its spans'; None for the identity."""
    transition, spans = maps.transition, plan.spans
    if transition is None:
        return None
    if plan.dense:
        return dense_transitions_of_pieces(plan, maps)
    out = plan.new(plan.sizes.B, spans.pieces, *transition.shape[2:])
    channels, block = math.prod(transition.shape[2:]), 256
    launch(
        through_kernel, (cdiv(channels, block), spans.pieces, plan.sizes.B), transition, out, spans.first, spans.count,
        spans.pieces, channels, BLK=block, VARLEN=plan.packed, num_warps=4,
    )  # fmt: skip
    return out
