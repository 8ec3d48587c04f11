"""PyTorch's fused attention for the CPU, through aten for its lse: the fastest there for causal and full blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import Tile
from ..scores import Scores
from .backend import Ask, QueryRows, TileBackend


class CPUFlash(TileBackend):
    """aten's _scaled_dot_product_flash_attention_for_cpu."""

    name = "cpu_flash"

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type != "cpu":
            return "tensors are not on the CPU"
        if ask.dtype == torch.float16:
            return "its fp16 backward is slower than plain PyTorch"
        return super().unsupported(ask)

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tile: Tile) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, not tile.full, scale=scores.scale
        )
        return o.transpose(1, 2), lse

    def tile_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = k.shape[2]
        do, o = x.do.transpose(1, 2), x.o.transpose(1, 2)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, *_heads_first(x.q, k, v), o, x.lse.contiguous(), 0.0, not tile.full, scale=scores.scale
        )
        dq, dk, dv = (g.transpose(1, 2) for g in grads)
        if groups != dk.shape[2]:
            dk, dv = (g.unflatten(2, (groups, -1)).sum(3) for g in (dk, dv))
        return dq, dk, dv


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, T, H, D] → [B, H, T, D]``, key heads repeated for the query heads that read them."""
    repeat = q.shape[2] // k.shape[2]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
