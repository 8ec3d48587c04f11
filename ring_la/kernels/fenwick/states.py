"""The nodes' states, and their gradients: a program sums one up from its tokens.

F_i = Σ_{s in i} e^{c_end − c_s} k_s v_sᵀ,        dF_i = Σ_{t reads i} scale λ_t e^{c_t − c_end} q_t do_tᵀ
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import SIZES, chunk_row, power, state_at, tile
from ring_la.kernels.fenwick.launches import LevelsCall
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    X, Y, c, lam, table, out, T, R, B, scale, H: tl.constexpr, HX: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, C: tl.constexpr, LOWER: tl.constexpr, PREC: tl.constexpr,
    READERS: tl.constexpr,
):  # fmt: skip
    """One node, the largest first. X is k and Y v, or (READERS) X is q and Y do."""
    b = tl.program_id(0) % (B * H) // H
    h = tl.program_id(0) % H
    row = tl.load(table + tl.program_id(0) // (B * H) * 8 + 7)
    edge, start, end, m, first, _ = chunk_row(table, row)
    if m <= first:
        return
    level = LOWER + tl.load(table + row * 8 + 6)
    length = (m & -m) * C
    ends = c + (b.to(tl.int64) * H + h) * T
    at_edge = tl.load(ends + edge - 1)
    d = tl.arange(0, BK)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    begin = edge if READERS else tl.maximum(edge - length, start)
    stop = tl.minimum(edge + length, end) if READERS else edge
    S = tl.zeros([BK, BV], tl.float32)
    for at in range(begin, stop, C):
        token = at + t
        live = token < stop
        x = tile(head(X, b, token, h, T, HX, H, K), live, d, K)
        y = tile(head(Y, b, token, h, T, H, H, V), live, e, V)
        now = tl.load(ends + token, live, other=0.0)
        weight = power(tl.where(live, now - at_edge if READERS else at_edge - now, float("-inf")))
        if READERS:
            weight *= scale * tl.load(head(lam, b, token, h, T, H, H, L) + level, live, other=0.0).to(tl.float32)
        S = tl.dot(tl.trans(x), (y * weight[:, None]).to(x.dtype), S, input_precision=PREC)
    into = state_at(out, b, row, h, R, H, K * V) + d[:, None] * V + e[None, :]
    tl.store(into, S.to(out.dtype.element_ty), (d < K)[:, None] & (e < V)[None, :])


def states(call: LevelsCall, x: Tensor, y: Tensor, c: Tensor, lam: Tensor, readers: bool) -> Tensor:
    """The state of each chunk's node, or its gradient, ``[B, R, H, K, V]``; undefined where a node is no node."""
    how, out = call.sums, x.new_empty(call.B, call.R, call.H, call.K, call.V)
    launch(
        states_kernel, (call.B * call.H * call.R, -(-call.V // how.block)),
        x, y, c, lam, call.table, out, call.T, call.R, call.B, call.scale, HX=x.shape[2], **call.constants,
        BV=how.block, READERS=readers, **how.options,
    )  # fmt: skip
    return out
