"""The gradient of a scalar decay, from what the passes of dq and dk summed: q·dq and k·dk by token.

The pair of a token with itself, which no decay touches, is in both sums: both passes round the same product the same
way, so it cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.scalar_decay.attend import TokenDots
from ring_la.kernels.scalar_decay.operands import Gates
from ring_la.kernels.sizes import power_of_2
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.tiles import SIZES, span


@triton.jit(do_not_specialize=SIZES)
def gate_gradient_kernel(
    reads, writes, border, edge, F, out, table, T, NS, NC, LENGTH, H: tl.constexpr, NR: tl.constexpr, NW: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, HAS_EDGE: tl.constexpr, FORGOTTEN: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """dg_t = Σ_{s≥t} (reads_s − writes_s) + E over a chunk, for one span of at most BC chunks.

    E = <S, dS> at the chunk's end: what passes through the chunk and what it writes, W. Going left, E becomes what
    passes through and what the chunk reads from before, R (`border`, by token). Inside the chunk reads and writes
    cancel but for R − W, so W = R − Σ (reads − writes). All of these are sums of rounded terms: E is known at the
    span's end, so that errors go no further than a span, which is why those are short (`table.GATE_SPAN`); and where a
    chunk's decay is below 2^FORGOTTEN nothing passes through, and saying so keeps the errors of one chunk out of all
    earlier ones.
    reads, border [NR, B, H, T], writes [NW, B, H, T], edge [NW, B, H, NS]: partial sums.
    """
    s = tl.program_id(0)
    row = tl.program_id(1)
    b = row // H
    h = row % H
    rows = tl.num_programs(1)
    start, end, _, chunk, _, _ = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    n = (left + C - 1) // C
    t = tl.arange(0, C)
    c = tl.arange(0, BC)
    token = c[:, None] * C + t[None, :]
    live = token < left
    x = tl.zeros([BC, C], tl.float32)
    R = tl.zeros([BC], tl.float32)
    E = 0.0
    for i in tl.static_range(NR):
        at = (i * rows + row).to(tl.int64) * T + start + token
        x += tl.load(reads + at, live, other=0.0)
        R += tl.sum(tl.load(border + at, live, other=0.0), 1)
    for i in tl.static_range(NW):
        part = (i * rows + row).to(tl.int64)
        x -= tl.load(writes + part * T + start + token, live, other=0.0)
        if HAS_EDGE:
            E += tl.load(edge + part * NS + s)
    f = F + ((b.to(tl.int64) * NC + chunk + c) * H + h) * (4 * C) + C - 1
    passes = (tl.load(f, c < n, other=0.0) >= FORGOTTEN).to(tl.int32)
    D = tl.sum(x, 1)  # R − W
    gives = tl.where(passes == 1, D, R)
    # E at the end of chunk i: what the chunks after it give, up to and with the first that lets nothing through
    stops = tl.cumsum(1 - passes, 0)  # stops in chunks up to i
    before = stops - (1 - passes)  # … before i
    reaches = (c[:, None] < c[None, :]) & (stops[:, None] == before[None, :])
    ends = tl.sum(tl.where(reaches, gives[None, :], 0.0), 1)
    ends += tl.where(stops == tl.sum(1 - passes, 0), E, 0.0)
    through = tl.where(passes == 1, ends - (R - D), 0.0)
    dg = tl.cumsum(x, 1, reverse=True) + (through + (R - D))[:, None]
    tl.store(out + (b.to(tl.int64) * T + start + token) * H + h, dg.to(out.dtype.element_ty), live)


def gate_gradient(plan: SpanPlan, gates: Gates, reads: TokenDots, writes: TokenDots, has_edge: bool) -> Tensor:
    """dg [B, T, H], from what the passes of dq and dk left; `gates` by token, `has_edge`: a gradient reaches spans."""
    (B, T, H, *_), spans = plan.sizes, plan.spans
    dg = plan.new(B, T, H)
    launch(
        gate_gradient_kernel, (spans.count, plan.rows), reads.out, writes.out, reads.of_state, writes.edge, gates.read,
        dg, spans.table, T, spans.count, plan.chunk_count, spans.length, H=H, NR=reads.out.shape[0],
        NW=writes.out.shape[0], C=plan.chunk, BC=power_of_2(spans.length // plan.chunk), HAS_EDGE=has_edge,
        FORGOTTEN=-24 if plan.dtype.itemsize == 4 else -11, VARLEN=plan.packed, num_warps=4,
    )  # fmt: skip
    return dg
