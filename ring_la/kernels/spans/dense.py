"""The scan over spans of dense transitions (see `prefix`), and the product of each piece's transitions.

Flags may say of some transitions that they are 0, which are not read then, and need not be written: what leaves such a
span is what it adds. States at the ends of pieces are then found from the last such span on, and a product that has one
is not made. A product with 0 is 0, so that leaving it out changes no bit but where it is not: what is infinite or NaN
ends at such a span, and -0 that a span adds stays -0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans import table
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.tiles import SIZES

FLAGS = 32
"""Flags that a program reads at a time."""
STEP = tl.constexpr(64)
"""Columns of a transition that one product takes: both halves of more of them do not fit in a thread's registers."""


@triton.jit
def spans_of(first, n, NS, VARLEN: tl.constexpr):
    """A piece's first span, and how many it has."""
    if VARLEN:
        return tl.load(first + n * 2), tl.load(first + n * 2 + 1)
    return 0, NS


@triton.jit
def tile(A, k, c, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A[k, c], or A[c, k] as such."""
    at = c[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + c[None, :]
    return tl.load(A + at, (k < K)[:, None] & (c < K)[None, :], other=0.0)


@triton.jit
def _flags(zero, spans, p, count, of, H: tl.constexpr, REVERSE: tl.constexpr):
    """Those at positions p before `count`, of the `of` of a piece on this way; `spans`: its first span's row."""
    s = of - 1 - p if REVERSE else p
    return tl.load(zero + spans + s * H, p < count, other=0)


@triton.jit
def _next(zero, spans, p, count, of, H: tl.constexpr, REVERSE: tl.constexpr, FLAGS: tl.constexpr):
    """The first position from p on whose transition is 0; `count`: there is none."""
    found = count
    while (p < count) & (found == count):
        i = p + tl.arange(0, FLAGS)
        found = tl.min(tl.where(_flags(zero, spans, i, count, of, H, REVERSE) != 0, i, count), 0)
        p += FLAGS
    return found


@triton.jit
def zeros_of(zero, spans, count, H: tl.constexpr, REVERSE: tl.constexpr, FLAGS: tl.constexpr):
    """The first position of a piece whose transition is 0 (`count`: there is none), the last (-1), and how many."""
    first = count
    last = -1
    many = 0
    for p in range(0, count, FLAGS):
        i = p + tl.arange(0, FLAGS)
        here = _flags(zero, spans, i, count, count, H, REVERSE) != 0
        first = tl.minimum(first, tl.min(tl.where(here, i, count), 0))
        last = tl.maximum(last, tl.max(tl.where(here, i, -1), 0))
        many += tl.sum(here.to(tl.int32), 0)
    return first, last, many


@triton.jit
def _in_steps(
    A, S, acc, k, c: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """acc + A[:, c : c + WIDE] S, by so many columns at a time that one product takes."""
    if WIDE <= STEP:
        return tl.dot(tile(A, k, c + tl.arange(0, WIDE), K, TRANSPOSED), S, acc, input_precision="tf32x3")
    else:
        HALF: tl.constexpr = WIDE // 2
        W: tl.constexpr = S.shape[1]
        upper, lower = tl.split(tl.permute(tl.reshape(S, [2, HALF, W]), [1, 2, 0]))
        acc = _in_steps(A, upper, acc, k, c, K, HALF, TRANSPOSED)
        return _in_steps(A, lower, acc, k, c + HALF, K, HALF, TRANSPOSED)


@triton.jit
def products(
    S, b_, A_, entering, spans, first, end, count, at, live, k, j, v, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, EYE: tl.constexpr, ENTER: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """S, which enters the span at position `first`, through those before `end`."""
    for i in range(first, end):
        row = spans + (count - 1 - i if REVERSE else i) * H
        if ENTER or BJ < BK:
            tl.store(entering + row * K * W + at, S, live)
        if EYE:
            acc = tl.zeros([BK, BV], tl.float32)
        else:
            acc = tl.load(b_ + row * K * W + at, live, other=0.0)
        if BJ == BK:
            S = _in_steps(A_ + row * K * K, S, acc, k, 0, K, BK, REVERSE)
        else:
            tl.debug_barrier()
            for m in range(0, K, BJ):
                c = m + j
                some = (c < K)[:, None] & (v < W)[None, :]
                part = tl.load(entering + row * K * W + c[:, None] * W + v[None, :], some, other=0.0)
                acc = tl.dot(tile(A_ + row * K * K, k, c, K, REVERSE), part, acc, input_precision="tf32x3")
            S = acc
    return S


@triton.jit
def runs(
    S, b_, A_, zero, entering, spans, p, count, of, at, live, k, j, v, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, FLAGS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """S, which enters the span at position p, through those before `count`, of the `of` of a piece: from one whose
    transition is 0 to the next. What enters each is stored."""
    while p < count:
        end = _next(zero, spans, p, count, of, H, REVERSE, FLAGS)
        S = products(
            S, b_, A_, entering, spans, p, end, of, at, live, k, j, v, H, K, W, BK, BJ, BV, False, True, REVERSE
        )
        if end < count:
            row = spans + (of - 1 - end if REVERSE else end) * H
            tl.store(entering + row * K * W + at, S, live)
            S = tl.load(b_ + row * K * W + at, live, other=0.0)
        p = end + 1
    return S


@triton.jit
def _fold(
    b_, A_, zero, S0, entering, leaving, spans, count, own, column, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, FLAGS: tl.constexpr, HAS_S0: tl.constexpr,
    EYE: tl.constexpr, ENTER: tl.constexpr, KNOWN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """BV columns of one piece's state [K, W] under dense transitions; EYE: of the product of the transitions, none of
    which is 0. `spans`, `own`: the rows of its first span and of its own states."""
    k = tl.arange(0, BK)
    j = tl.arange(0, BJ)
    v = column * BV + tl.arange(0, BV)
    live = (k < K)[:, None] & (v < W)[None, :]
    at = k[:, None] * W + v[None, :]
    behind = -1  # the position that nothing before it matters behind
    if KNOWN and not ENTER and not EYE:
        _, behind, _ = zeros_of(zero, spans, count, H, REVERSE, FLAGS)
    begin = tl.maximum(behind, 0)
    row = spans + (tl.maximum(count - 1 - begin, 0) if REVERSE else begin) * H
    if EYE:
        S = tile(A_ + row * K * K, k, v, K, REVERSE)
        if count == 0:
            S = (k[:, None] == v[None, :]).to(tl.float32)
    elif HAS_S0:
        from_ = S0 + own * K * W
        if behind >= 0:
            from_ = b_ + row * K * W
        S = tl.load(from_ + at, live, other=0.0)
    else:
        S = tl.load(b_ + row * K * W + at, live & (count > 0), other=0.0)
        if ENTER:
            tl.store(entering + row * K * W + at, tl.zeros([BK, BV], tl.float32), live & (count > 0))
    p = behind + 1 if HAS_S0 else begin + 1
    if KNOWN and ENTER:
        S = runs(
            S, b_, A_, zero, entering, spans, p, count, count, at, live, k, j, v, H, K, W, BK, BJ, BV, FLAGS, REVERSE
        )
    else:
        S = products(
            S, b_, A_, entering, spans, p, count, count, at, live, k, j, v, H, K, W, BK, BJ, BV, EYE, ENTER, REVERSE
        )  # fmt: skip
    tl.store(leaving + own * K * W + at, S, live)


@triton.jit(do_not_specialize=SIZES)
def prefix_dense_kernel(
    b_, A_, zero, S0, entering, leaving, before, passed, first, NS, N, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, FLAGS: tl.constexpr, HAS_S0: tl.constexpr,
    ENTER: tl.constexpr, STATES: tl.constexpr, MAPS: tl.constexpr, KNOWN: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Dense transitions A [B, NS, H, K, K]. Where A is too large for one tile (BJ < BK), its columns meet the state BJ
    at a time, from `entering`.

    STATES: the scan itself. MAPS: the product of each piece's transitions, by programs of their own, in `passed` [B, N,
    H, K, K]; `before` [B, NS, H, K, K] is what `entering` is to states. KNOWN: `zero` [B, NS, H] says which transitions
    are 0.
    """
    NV: tl.constexpr = (V + BV - 1) // BV if STATES else 0
    column = tl.program_id(0)
    n = tl.program_id(1)
    b = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    lo, count = spans_of(first, n, NS, VARLEN)
    spans = (b * NS + lo) * H + h
    own = (b * N + n) * H + h
    if STATES:
        if column < NV:
            _fold(
                b_, A_, zero, S0, entering, leaving, spans, count, own, column, H, K, V, BK, BJ, BV, FLAGS, HAS_S0,
                False, ENTER, KNOWN, REVERSE,
            )  # fmt: skip
    if MAPS:
        if column >= NV:
            lost = count < 0
            if KNOWN:
                _, _, many = zeros_of(zero, spans, count, H, REVERSE, FLAGS)
                lost = many > 0
            if lost:
                _clear(passed + own * K * K, column - NV, K, BK, BV)
            else:
                _fold(
                    A_, A_, zero, A_, before, passed, spans, count, own, column - NV, H, K, K, BK, BJ, BV, FLAGS,
                    False, True, ENTER, KNOWN, REVERSE,
                )  # fmt: skip


@triton.jit
def _clear(to, column, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """BV columns of a product that is 0."""
    k = tl.arange(0, BK)
    v = column * BV + tl.arange(0, BV)
    tl.store(to + k[:, None] * K + v[None, :], tl.zeros([BK, BV], tl.float32), (k < K)[:, None] & (v < K)[None, :])


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
    spans, known = plan.spans, maps.zero is not None
    how = plan.fitting((table.PREFIX_MAPS if products else table.PREFIX)[max(64, width(K))])
    launch(
        prefix_dense_kernel, (cdiv(V, how.block) * states + cdiv(K, how.block) * products, spans.pieces, plan.rows),
        *filled(
            maps.own, maps.transition, maps.zero, S0, out.entering, out.leaving, out.before, out.transitions,
        ),
        spans.first, spans.count, spans.pieces, H=H, K=K, V=V, BK=width(K), BJ=part(K), BV=how.block, FLAGS=FLAGS,
        HAS_S0=S0 is not None, ENTER=enter, STATES=states, MAPS=products, KNOWN=known, REVERSE=reverse,
        VARLEN=plan.packed, **how.options,
    )  # fmt: skip


def room_for_transitions(plan: SpanPlan) -> Tensor:
    """For the products of the pieces' transitions."""
    B, _, H, _, K, _ = plan.sizes
    return plan.new(B, plan.spans.pieces, H, K, K)


def in_parts(plan: SpanPlan) -> bool:
    """Whether a dense transition meets the state in parts, which it finds in `entering`."""
    return plan.dense and part(plan.sizes.K) < width(plan.sizes.K)


def part(K: int) -> int:
    """Columns of a dense transition that a scan reads at a time: all up to 128."""
    return width(K) if width(K) <= 128 else 32
