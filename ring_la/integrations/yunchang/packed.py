"""Packed documents: tensors ``[T, H, D]`` of this rank, with local offsets of its part of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, describe_tensor
from ...layout import check_cu_seqlens
from ...softmax.merging import wide
from ...softmax.plan import Saved
from ...softmax.tensors import Tensors
from .call import UpstreamCall, group_of
from .ctx import others, recall, remember


def pad_lse(lse: Tensor, cu: list[int], longest: int) -> Tensor:
    """``[H, T] → [N, H, longest]``, a row a document."""
    out = lse.new_zeros(len(cu) - 1, lse.shape[0], longest)
    for row, a, b in zip(out, cu, cu[1:]):
        row[:, : b - a] = lse[:, a:b]
    return out


def flat_lse(lse: Tensor, cu: list[int]) -> Tensor:
    """``[H, T]`` from either form."""
    if lse.dim() == 2:
        return lse
    return torch.cat([row[:, : b - a] for row, a, b in zip(lse, cu, cu[1:])], 1)


def check_packed(cu_seqlens: object, max_seqlen: object, q: Tensor, k: Tensor) -> None:
    """Refuse offsets that are not those of this rank's tokens."""
    if not isinstance(cu_seqlens, Tensor):
        raise ArgumentError("cu_seqlens", "an integer tensor [N+1]", describe_tensor(cu_seqlens))
    if len(k) != len(q):
        raise ArgumentError("k", f"as many tokens as q, {len(q)}", len(k))
    cu = check_cu_seqlens(cu_seqlens, len(q))
    check_longest("max_seqlen", max_seqlen, cu)


def check_longest(name: str, given: Any, cu: Sequence[int]) -> None:
    """Refuse a longest document of fewer tokens than that at offsets `cu`."""
    longest = max(b - a for a, b in zip(cu, cu[1:]))
    if not hasattr(given, "__index__") or int(given) < longest:
        raise ArgumentError(name, f"at least the longest document's {longest} tokens on this rank", given)


def half_index(cu: list[int], front: bool, device: torch.device) -> slice | Tensor:
    """The first or second half of each document's local rows, as upstream keeps them for its backward."""
    if len(cu) == 2:
        return slice(None, cu[1] // 2) if front else slice(cu[1] // 2, None)
    index = torch.zeros(cu[-1], dtype=torch.bool, device=device)
    for a, b in zip(cu, cu[1:]):
        middle = (a + b) // 2
        index[a : middle if front else b] = front
        if not front:
            index[middle:b] = True
    return index


def varlen_forward(
    ctx: Any,
    call: UpstreamCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    cu = cu_seqlens.tolist()
    x = Tensors(*(t.contiguous()[None] for t in (q, k, v)))
    out, lse, _ = call.plan(x, group_of(group), cu=cu).forward(x)
    out, lse = out[0], pad_lse(lse[0], cu, int(max_seqlen))
    halves = [half_index(cu, front, q.device) for front in (True, False)] if call.kind == "zigzag" else []
    ctx.is_half_index_tensor = bool(halves) and isinstance(halves[0], Tensor)
    if halves and not ctx.is_half_index_tensor:
        ctx.half_index0, ctx.half_index1 = halves
        halves = []
    ctx.save_for_backward(q, x.k[0], x.v[0], out, lse, cu_seqlens, *halves)
    ctx.max_seqlen = max_seqlen
    remember(ctx, call, group, None, None)
    return out, lse


def varlen_backward(ctx: Any, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors[:6]
    cu, call, x = cu_seqlens.tolist(), recall(ctx, kind, 4), Tensors(q[None], k[None], v[None])
    saved = Saved(x, out[None], flat_lse(lse, cu)[None].to(wide(q.dtype)))
    dlse = None if dlse is None else flat_lse(dlse, cu)[None]
    dout = None if dout is None else dout[None]
    grads = call.plan(x, group_of(ctx.group), cu=cu).backward(saved, dout, dlse)
    return grads.q[0], grads.k[0], grads.v[0], *others(ctx)
