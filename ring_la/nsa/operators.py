"""What `nsa` does between a caller's functions, as registered operators: a compiler sees these functions between two
nodes.

    ring_la::nsa_blocks       keys and values -> the blocks of which this rank makes keys, and where they begin
    ring_la::nsa_compressed   queries, the keys and values made of them -> o of the compressed branch, the choice

How many blocks a rank has depends on how the sequence is cut. A graph that serves all lengths sees `room` of them, no
fewer than there can be: the last block stands in the places that are left, and what is made of those is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..balanced import PARTS
from ..context import ShardedLayout
from ..context.handle import found
from ..context.operator import SplitOperator
from ..errors import Facts
from ..indexers.chosen import Rows
from ..schemas import declared
from .choice import Sizes, choose_blocks
from .compressed import Compressed


def room(k: Tensor, stride: int, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> int:
    """At least the blocks that this rank makes keys of: one in `stride` tokens and one more in each run of a
    document's."""
    if layout is not None and not layout.has_runs:
        return layout.seq_len // stride + layout.num_documents
    if layout is not None:
        return k.shape[1] // stride + layout.num_documents + max(PARTS)
    return k.shape[1] // stride + (1 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def rows_of(queries: int, total: int, device: torch.device, cu_seqlens: Tensor | None, layout: int) -> Rows:
    """Where the queries of a call stand; a layout by its number, 0 for none."""
    if layout:
        of = found(layout)
        return of.kept(Rows, lambda: Rows(queries, of, None, device))
    return Rows(total, None, cu_seqlens, device, None if queries == total else queries)


def _blocks(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, layout: int, queries: int, length: int, stride: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, room, length, Hk, K]``, ``[…, V]`` and positions ``[room]``."""
    if layout:
        of = found(layout)
        facts = (("k", Facts.of(k, 1)), ("v", Facts.of(v, 1)), ("sizes", (length, stride)))
        of.require_local("k", k.shape[1])
        of.agree("nsa", facts, None)
    compressed = Compressed.of(length, stride, rows_of(queries, k.shape[1], k.device, cu_seqlens, layout))
    of_k, of_v = (_filled(x, 1, room) for x in compressed.blocks(k, v))
    return of_k, of_v, _filled(compressed.positions, 0, room)


def _filled(x: Tensor, dim: int, room: int) -> Tensor:
    """`x` with its last row again in the places up to `room`, or zeros where there is none."""
    n = x.shape[dim]
    if n:
        return x.index_select(dim, torch.arange(room, device=x.device).clamp_(max=n - 1))
    sizes = [0, 0] * (x.dim() - 1 - dim) + [0, room]
    return torch.nn.functional.pad(x, sizes)


def _blocks_fake(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, layout: int, queries: int, length: int, stride: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    of_k, of_v = (x.new_empty(x.shape[0], room, length, *x.shape[2:]) for x in (k, v))
    return of_k, of_v, k.new_empty(room, dtype=torch.int64)


nsa_blocks = SplitOperator("nsa_blocks", _blocks, _blocks_fake, 2)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, sizes: Sequence[int], scale: float, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Compressed]:
    """o and lse of the compressed branch, its keys, and where they stand."""
    each = Sizes(*sizes)
    compressed = Compressed.of(each.length, each.stride, rows)
    n = compressed.local_length
    k, v = compressed.everywhere(k[:, :n], v[:, :n])
    return *compressed.attention(q, k, v, scale, backend), k, compressed


class CompressedOthers(NamedTuple):
    """What the compressed branch has beside q, k and v.

    Attributes:
        layout: its number, 0 for none. total: tokens of all keys. sizes: of `Sizes`.
    """

    cu_seqlens: Tensor | None
    layout: int
    total: int
    sizes: Sequence[int]
    scale: float
    backend: str | None

    def rows(self, q: Tensor) -> Rows:
        return rows_of(q.shape[1], self.total, q.device, self.cu_seqlens, self.layout)


def _compressed(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """o ``[B, Tq, H, V]``, and the choice, int32 ``[B, Tq, Hk, topk]``."""
    x = CompressedOthers(*others)
    rows = x.rows(q)
    o, lse, k, compressed = _attended(q, k, v, rows, x.sizes, x.scale, x.backend)
    return o, choose_blocks(q, k, lse, x.scale, Sizes(*x.sizes), rows, compressed)


def _compressed_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (B, T, H, _), topk = q.shape, Sizes(*CompressedOthers(*others).sizes).topk
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, k.shape[2], topk, dtype=torch.int32)


def _compressed_again(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """o alone: the choice has no gradient."""
    x = CompressedOthers(*others)
    o, _, _, _ = _attended(q, k, v, x.rows(q), x.sizes, x.scale, x.backend)
    return o


nsa_compressed = SplitOperator(
    "nsa_compressed",
    _compressed,
    _compressed_fake,
    3,
    again=_compressed_again,
    schema=f"(Tensor q, Tensor k, Tensor v, {declared(CompressedOthers)}) -> (Tensor, Tensor)",
)
