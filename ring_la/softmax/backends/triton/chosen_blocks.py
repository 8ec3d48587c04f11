"""Launching the kernels that go over whole blocks of keys, for queries side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....kernels.sizes import width
from ...geometry import Pair, Tokens
from ...merging import Gradients, Partial
from ...merging.parts import dense
from ...scores import Scores
from ..backend import Ask, QueryRows
from .chosen import WIDEST_OF_BLOCKS, TritonChosen
from .table import TileSettings

SMALLEST = 16
"""Keys of a block."""
SLOTS = 1 << 24
"""Choices that lists name at once, some 40 bytes each."""
UNITED = 2048
"""Choices of a group of queries among which blocks are found that several of them read."""
PROGRAMS, PIECES = 2048, 4
"""How many programs that sum gradients of keys are enough, and the most pieces that a list is cut into for it."""

FORWARD = TileSettings(64, 64, 4, 3)
QUERIES = TileSettings(64, 64, 4, 2)
KEYS = TileSettings(64, 64, 4, 2)
"""Of the kernels, as `tests/gpu/test_chosen.py` has run them on an H200; rows are queries × their heads. `python -m
benchmarks.tuning.blocks` times others beside them."""


class ChosenBlocks(NamedTuple):
    """What kernels ask of a call: the choice, where keys and queries stand, and how far these see."""

    chosen: Tensor
    pair: Pair
    block: int

    @classmethod
    def of(cls, chosen: Tensor, pair: Pair, block: int) -> ChosenBlocks:
        """The same for any choice: lists have at least one place."""
        return cls(dense(chosen) if chosen.shape[3] else pad(chosen, (0, 1), value=-1), pair, block)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Of places, and of rows."""
        (q_pos, q_doc, _), (k_pos, k_doc, _) = self.pair.rows.columns, self.pair.keys.columns
        return self.pair.keys.places, runs(self.pair.keys), q_pos, q_doc, k_pos, k_doc

    @property
    def reach(self) -> tuple[int, int]:
        left, right = self.pair.reach
        return left or 0, right or 0

    @property
    def constants(self) -> dict[str, Any]:
        left, right = self.pair.reach
        return dict(BLOCK=self.block, LEFT=left is not None, RIGHT=right is not None)

    def parts(self) -> Iterator[tuple[int, int]]:
        """The first of some queries and how many they are, so that lists are no longer than memory is kept for."""
        B, Tq, heads, S = self.chosen.shape
        n = max(64, SLOTS // max(1, B * heads * S) // 64 * 64)
        for first in range(0, Tq, n):
            yield first, min(n, Tq - first)


class BlockChosen(TritonChosen):
    """Queries side by side read the blocks that any of them has chosen; a block's gradients are summed over the queries
    that have chosen it. Every sum is formed in the same order in every run."""

    name = "triton_blocks"

    def unsupported(self, ask: Ask) -> str:
        if ask.block < SMALLEST:
            return f"it needs blocks of at least {SMALLEST} keys, not {ask.block}"
        if max(ask.width, ask.value_width) > WIDEST_OF_BLOCKS:
            return f"it needs K and V up to {WIDEST_OF_BLOCKS}, not {ask.width} and {ask.value_width}"
        return super().unsupported(ask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from ....kernels.runtime.launch import launch
        from . import block_kernels

        q, k, v, call = dense(q), dense(k), dense(v), ChosenBlocks.of(self.chosen, pair, scores.block)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for grid, arguments, constants in _groups(FORWARD, call, scores, q, k, v):
            strides = (s for x in (q, k, v, o) for s in x.stride()[:3])
            constants["NEGATIVE"] = scores.scale < 0
            launch(block_kernels.forward, grid, q, k, v, o, lse, *arguments, *strides, **constants, tensors="any")
        out.add(o, lse)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from ....kernels.runtime.launch import launch
        from . import block_kernels

        assert x.delta is not None  # kernels for chosen keys take it
        call = ChosenBlocks.of(self.chosen, pair, scores.block)
        q, k, v, do = dense(x.q), dense(k), dense(v), dense(x.do)
        lse = x.lse.transpose(1, 2).contiguous()  # [B, Tq, H]: a query's heads side by side
        lse = torch.where(torch.isneginf(lse), torch.inf, lse)
        sums = lse, x.delta.transpose(1, 2).contiguous()
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        of_queries = q, k, v, do, *sums, dq
        for grid, arguments, constants in _groups(QUERIES, call, scores, q, k, v):
            strides = (s for y in (q, k, v, do, dq) for s in y.stride()[:3])
            launch(block_kernels.queries, grid, *of_queries, *arguments, *strides, **constants, tensors="any")
        out.dq.add(dq)
        for dk, dv in zip(*_of_keys(call, scores, (q, k, v, do), sums)):
            out.dk.add(dk)
            out.dv.add(dv)


def _groups(
    tile: TileSettings, call: ChosenBlocks, scores: Scores, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[tuple[int, int], tuple, dict]]:
    """Of some groups of queries at a time: the grid of their programs, arguments from their lists on, and constants."""
    from ....kernels.runtime.launch import launch
    from . import block_lists

    chosen, tables, reach = call.chosen, call.tables, call.reach
    (B, Tq, heads, S), Hk, ends = chosen.shape, k.shape[2], len(tables[0])
    sizes = _sizes(tile, call, q, k, v)
    M, G = sizes["M"], sizes["G"]
    united = min(1 << max(0, S - 1).bit_length(), max(1, UNITED // M))
    for first, n in call.parts():
        groups = -(-n // M)
        at, readers, counts = (
            torch.empty(B * groups * heads * each, dtype=dtype, device=q.device)
            for each, dtype in ((S * M, torch.int32), (S * M, torch.int64), (2, torch.int32))
        )
        launch(
            block_lists.grouped, (groups, B * heads), at, readers, counts, chosen, *tables, *reach, first, first + n, S,
            ends, groups, heads, *chosen.stride()[:3], M=M, BS=united, **call.constants, num_warps=4, tensors="any",
        )  # fmt: skip
        grid = groups, -(-G // sizes["BG"]) * B * Hk
        numbers = *reach, first, Tq, S, ends, groups, heads
        places, _, *columns = tables
        yield grid, (at, readers, counts, places, *columns, scores.scale, *numbers), sizes


def _of_keys(
    call: ChosenBlocks, scores: Scores, tensors: tuple[Tensor, ...], sums: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """dk and dv, in pieces."""
    from ....kernels.runtime.launch import launch
    from . import block_kernels

    (q, k, v, _), (places, _, *columns) = tensors, call.tables
    (B, _, heads, _), Hk, ends = call.chosen.shape, k.shape[2], len(places)
    sizes = _sizes(KEYS, call, q, k, v)
    sizes["BN"] = min(sizes["BN"], 1 << (call.block.bit_length() - 1))
    tiles = -(-ends // sizes["BN"])
    pieces = min(PIECES, -(-PROGRAMS // max(1, tiles * B * Hk)))
    dk, dv = (torch.empty(pieces, *x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for first, n in call.parts():
        lists = _readers(call, first, n, sizes["BN"], room=2 * sizes["M"])  # programs look that far ahead
        launch(
            block_kernels.keys, (tiles * pieces, B * Hk), *tensors, *sums, dk, dv, *lists, places, *columns,
            scores.scale, *call.reach, q.shape[1], ends, tiles, heads, pieces,
            *(s for x in tensors for s in x.stride()[:3]), *dk.stride()[:4], *dv.stride()[:4], **sizes,
            MORE=first > 0, tensors="any",
        )  # fmt: skip
    return dk, dv


def _readers(call: ChosenBlocks, first: int, n: int, BN: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of n queries from `first` on who reads what, sorted by tiles of BN places: queries, where the blocks that they
    read begin, both with some room behind, and the first of each tile and kind in these."""
    from ....kernels.runtime.launch import launch
    from . import block_lists

    chosen, tables = call.chosen, call.tables
    (B, _, heads, S), ends, device = chosen.shape, len(tables[0]), chosen.device
    tiles, each = -(-ends // BN), n * heads * S
    last = B * heads * tiles * 3
    numbers = torch.empty(B * each, dtype=torch.int32, device=device)
    launch(
        block_lists.numbered, (-(-each // 512), B), numbers, chosen, *tables, *call.reach, first, n, S, ends, tiles,
        heads, last, *chosen.stride()[:3], BP=512, BN=BN, **call.constants, num_warps=4, tensors="any",
    )  # fmt: skip
    numbers, order = numbers.sort(stable=True)
    starts = torch.searchsorted(numbers, torch.arange(last + 1, dtype=torch.int32, device=device), out_int32=True)
    query, begin = (torch.empty(len(numbers) + room, dtype=torch.int32, device=device) for _ in range(2))
    launch(
        block_lists.spelled, (-(-len(order) // 512),), query, begin, order, chosen, first, n, S, len(order), heads,
        *chosen.stride()[:3], BP=512, num_warps=4, tensors="any",
    )  # fmt: skip
    return query, begin, starts


def _sizes(tile: TileSettings, call: ChosenBlocks, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The constants of a kernel. Tiles of fp32 are twice as large."""
    (H, K), Hk, V = q.shape[2:], k.shape[2], v.shape[3]
    exact = q.dtype == torch.float32
    rows, keys = (tile.rows // 4, tile.keys // 2) if exact else (tile.rows, tile.keys)
    G = H // Hk
    heads = min(rows, 1 << (G - 1).bit_length())
    M = min(64, rows // heads)  # a bit each
    return dict(
        KW=K, VW=V, H=H, G=G, M=M, BG=heads, BN=min(keys, width(call.block)), BK=width(K), BV=width(V),
        **call.constants, PRECISION="ieee" if exact else "tf32", num_warps=min(tile.warps, max(4, M * heads // 16)),
        num_stages=1 if exact else tile.stages,
    )  # fmt: skip


def runs(keys: Tokens) -> Tensor:
    """Of each place of the sequence a number, the same of places whose keys are rows one after the other of one
    document, and of places whose keys are not at hand, int32; made once."""
    return keys.kept(_runs, lambda: _runs(keys))


def _runs(keys: Tokens) -> Tensor:
    from ....kernels.runtime.launch import launch
    from . import block_lists

    places, (positions, documents, _) = keys.places, keys.columns
    out = torch.empty_like(places)
    launch(
        block_lists.breaks, (max(1, -(-len(places) // 512)),), out, places, positions, documents, len(places), BN=512,
        num_warps=4, tensors="any",
    )  # fmt: skip
    return out.cumsum(0, dtype=torch.int32)
