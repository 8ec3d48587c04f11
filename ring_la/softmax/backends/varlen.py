"""Kernels in the manner of FlashAttention: a band mask counted from the last row and key, and varlen calls."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...kernels import gpu
from ..geometry import Pair, Tile
from ..merging import Gradients, Partial, has_triton
from ..scores import Scores
from .backend import Ask, QueryRows, TileBackend
from .packs import Pack, Window, named, packs

HALVES = (torch.float16, torch.bfloat16)
LEAST_ROWS = 512
"""Fewer queries than this are no work for kernels that one takes for many."""


def enough_rows(ask: Ask) -> bool:
    """Whether a call has many queries, as far as is known."""
    return ask.rows is None or ask.rows >= LEAST_ROWS


class VarlenBackend(TileBackend):
    """A kernel that takes one rectangle, or several sequences of rows with their offsets.

    Attributes:
        widest: its largest head width.
        joins_tiles: whether several tiles may go into one varlen call.
        devices, dtypes: what it runs on.
    """

    square_only = False
    widest = 256
    joins_tiles = True
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = HALVES

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type not in self.devices:
            return "tensors are not on a CUDA device"
        if ask.dtype not in self.dtypes:
            return f"it needs fp16 or bf16, not {ask.dtype}"
        if ask.width > self.widest or ask.width % 8:
            return f"it needs K a multiple of 8 up to {self.widest}, not {ask.width}"
        return super().unsupported(ask)

    def suits(self, ask: Ask) -> bool:
        """On Hopper at K = 128 and 256 the Triton kernel is ahead of FlashAttention-2, but for few queries."""
        return not enough_rows(ask) or ask.width not in (128, 256) or not has_triton() or not gpu.is_hopper(ask.device)

    @abstractmethod
    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        """o like q and lse ``[B, H, Tq]`` of ``q [B, Tq, H, D]``; with a pack (B = 1) its sequences apart."""

    @abstractmethod
    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of `call`."""

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tile: Tile) -> tuple[Tensor, Tensor]:
        return self.call(q, k, v, scores, Window.of(tile), None)

    def tile_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.call_backward(x._replace(lse=x.lse.contiguous()), k, v, scores, Window.of(tile), None)

    def _calls(self, pair: Pair, batch: int) -> tuple[list[Pack], list[Tile]]:
        """The varlen calls of a block of so many batch rows, and its tiles that take a call each."""
        return packs(pair) if batch == 1 and self.joins_tiles else ([], named(pair))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        together, single = self._calls(pair, len(q))
        for p in together:
            parts = self.call(p.q.take(q), p.k.take(k), p.k.take(v), scores, p.window, p)
            out.add(*parts, p.q.rows)
        self.add_tiles(single, q, k, v, scores, out)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        together, single = self._calls(pair, len(k))
        for p in together:
            q, o, do = (p.q.take(t) for t in (x.q, x.o, x.do))
            rows = QueryRows(q, o, do, p.q.take(x.lse, 2).contiguous())
            parts = self.call_backward(rows, p.k.take(k), p.k.take(v), scores, p.window, p)
            out.add(*parts, p.q.rows, p.k.rows)
        self.add_gradients(single, x, k, v, scores, out)
