"""Kernels in the manner of FlashAttention: a band mask counted from the last row and key, and varlen calls."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import Gradients, Partial, has_triton
from ..scores import Scores
from ..tiles import Tile
from ..tokens import Tokens
from .backend import Ask, TileBackend, k_rows, q_rows
from .packs import Pack, bottom_right, named, packs

HALVES = (torch.float16, torch.bfloat16)
LEAST_ROWS = 512
"""Fewer queries than this are no work for kernels that one takes for many."""


class Window(NamedTuple):
    """A mask as FlashAttention names it: row i of n sees columns from ``i + m − n − left`` to ``i + m − n + right``."""

    causal: bool
    left: int = -1
    right: int = -1

    @classmethod
    def of(cls, t: Tile) -> Window:
        """The mask of a trimmed tile."""
        if t.full or bottom_right(t):
            return cls(not t.full)
        shift = (t.k1 - t.k0) - (t.q1 - t.q0)
        return cls(False, -1 if t.lo is None else shift - t.lo, -1 if t.hi is None else t.hi - shift)


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

    def refuses(self, ask: Ask) -> str:
        if ask.device.type not in self.devices:
            return "tensors are not on a CUDA device"
        if ask.dtype not in self.dtypes:
            return f"it needs fp16 or bf16, not {ask.dtype}"
        if ask.width > self.widest or ask.width % 8:
            return f"it needs K a multiple of 8 up to {self.widest}, not {ask.width}"
        return super().refuses(ask)

    def suits(self, ask: Ask) -> bool:
        """On Hopper at K = 128 the Triton kernel is ahead of FlashAttention-2, but for few queries."""
        few = ask.rows is not None and ask.rows < LEAST_ROWS
        return few or ask.width != 128 or not has_triton() or torch.cuda.get_device_capability(ask.device) != (9, 0)

    @abstractmethod
    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        """o like q and lse ``[B, H, Tq]`` of ``q [B, Tq, H, D]``; with a pack (B = 1) its sequences apart."""

    @abstractmethod
    def call_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        scale: float,
        window: Window,
        pack: Pack | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of `call`."""

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
        return self.call(q, k, v, scale, Window.of(tile), None)

    def tile_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.call_backward(do, q, k, v, o, lse.contiguous(), scale, Window.of(tile), None)

    def _tiles(self, scores: Scores, tq: Tokens, tk: Tokens) -> list[Tile]:
        return named(scores, tq, tk)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        if q.shape[0] > 1 or not self.joins_tiles:
            return super().forward(q, k, v, scores, tq, tk, out)
        together, single = packs(scores, tq, tk)
        for p in together:
            parts = self.call(p.q.take(q), p.k.take(k), p.k.take(v), scores.scale, Window(p.causal), p)
            out.add(*parts, p.q.rows)
        for t in single:
            part = self.tile_forward(q_rows(q, t), k_rows(k, t), k_rows(v, t), scores.scale, t)
            out.add(*part, t.rows)
        return None

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        if q.shape[0] > 1 or not self.joins_tiles:
            return super().backward(do, q, k, v, o, lse, delta, scores, tq, tk, out)
        together, single = packs(scores, tq, tk)
        for p in together:
            of_q, of_k = [p.q.take(x) for x in (do, q)], [p.k.take(x) for x in (k, v)]
            rest = p.q.take(o), p.q.take(lse, 2).contiguous()
            out.add(*self.call_backward(*of_q, *of_k, *rest, scores.scale, Window(p.causal), p), p.q.rows, p.k.rows)
        for t in single:
            row_lse = lse if t.q1 - t.q0 == lse.shape[2] else lse[:, :, t.rows]
            of_q, of_k = [q_rows(x, t) for x in (do, q, o)], [k_rows(x, t) for x in (k, v)]
            parts = self.tile_backward(*of_q[:2], *of_k, of_q[2], row_lse, scores.scale, t)
            out.add(*parts, t.rows, t.keys)
        return None
