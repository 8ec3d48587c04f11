"""The merge of a partial result into the accumulators in one pass over memory: a Triton kernel and its launcher."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(do_not_specialize=("T",))
def _merge(
    O, L, o, l, T, H, V,
    O_b, O_t, O_h, L_b, L_h, o_b, o_t, o_h, l_b, l_h, l_t,
    R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    rows, bh = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    columns, inside = tl.arange(0, BV), rows < T
    old_at = L + b * L_b + h * L_h + rows
    old = tl.load(old_at, mask=inside, other=-float("inf"))
    new = tl.load(l + b * l_b + h * l_h + rows * l_t, mask=inside, other=-float("inf"))
    top = tl.maximum(old, new)
    safe = tl.where(top == -float("inf"), 0.0, top)
    keep, take = tl.exp(old - safe), tl.exp(new - safe)
    total = tl.where(keep + take > 0, keep + take, 1.0)
    mask = inside[:, None] & (columns < V)[None, :]
    row = rows[:, None].to(tl.int64)
    into = O + b * O_b + h * O_h + row * O_t + columns[None, :]
    x = tl.load(into, mask=mask, other=0.0)
    y = tl.load(o + b * o_b + h * o_h + row * o_t + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(into, (x * keep[:, None] + y * take[:, None]) / total[:, None], mask=mask)
    tl.store(old_at, tl.where(keep + take > 0, safe + tl.log(total), -float("inf")), mask=inside)


def merge(O: Tensor, L: Tensor, o: Tensor, lse: Tensor) -> None:
    """``(o, lse)`` into fp32 ``O [B, T, H, V]`` and ``L [B, H, T]`` in place; last dimensions contiguous."""
    B, T, H, V = O.shape
    o = o if o.stride(3) == 1 else o.contiguous()
    grid = (triton.cdiv(T, ROWS), B * H)
    strides = (*O.stride()[:3], *L.stride()[:2], *o.stride()[:3], lse.stride(0), lse.stride(1), lse.stride(2))
    _merge[grid](O, L, o, lse, T, H, V, *strides, R=ROWS, BV=triton.next_power_of_2(V), num_warps=4)
