"""PyTorch's own FlashAttention-2 and cuDNN kernels, through aten for their lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import gpu
from ..geometry import Tile
from ..scores import Scores
from .backend import Ask, QueryRows, TileBackend
from .packs import Pack
from .varlen import HALVES, VarlenBackend, Window, enough_rows

aten = torch.ops.aten
LATENT = 192, 128
"""K and V of the other heads that cuDNN has on Hopper: DeepSeek's keys and values, made of latents."""
WIDE = torch.__version__ >= "2.11"
"""Whether this PyTorch's cuDNN has heads of 256 channels on Hopper: 2.11's passes our checks, forward and backward."""


class Flash(VarlenBackend):
    """FlashAttention-2 as built into PyTorch (aten::_flash_attention_forward)."""

    name = "flash"

    def unsupported(self, ask: Ask) -> str:
        why = super().unsupported(ask)
        if why:
            return why
        if ask.repeatable and not torch.are_deterministic_algorithms_enabled():
            return "its backward is repeatable only under torch.use_deterministic_algorithms"
        return "" if gpu.capability(ask.device) >= (8, 0) else "it needs compute capability 8.0"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        tensors, lengths = self._arguments(pack, q, k, v)
        o, lse, *_ = aten._flash_attention_forward(
            *tensors, *lengths, 0.0, window.causal, False, scale=scores.scale, **_bounds(window)
        )
        return (o, lse) if pack is None else (o[None], lse[None])

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v, o, do), lengths = self._arguments(pack, x.q, k, v, x.o, x.do)
        lse = x.lse if pack is None else x.lse[0]
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        inputs = do.contiguous(), q, k, v, o.contiguous(), lse
        grads = aten._flash_attention_backward(
            *inputs, *lengths, 0.0, window.causal, *rng, scale=scores.scale, **_bounds(window)
        )
        return tuple(grads if pack is None else (g[None] for g in grads))

    @staticmethod
    def _arguments(pack: Pack | None, q: Tensor, k: Tensor, *more: Tensor) -> tuple[list[Tensor], tuple]:
        """The tensors as the operator takes them, and (cu_q, cu_k, longest q, longest k)."""
        if pack is not None:
            return [x[0] for x in (q, k, *more)], (pack.q.cu, pack.k.cu, pack.q.longest, pack.k.longest)
        return [q, k, *more], (None, None, q.shape[1], k.shape[1])


def _bounds(window: Window) -> dict[str, Any]:
    if window.left < 0 and window.right < 0:
        return {}
    return dict(
        window_size_left=None if window.left < 0 else window.left,
        window_size_right=None if window.right < 0 else window.right,
    )


class CuDNN(TileBackend):
    """cuDNN's attention (aten::_scaled_dot_product_cudnn_attention): the fastest on Hopper for large blocks."""

    name = "cudnn"

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type != "cuda":
            return "tensors are not on a CUDA device"
        if ask.dtype not in HALVES:
            return f"it needs fp16 or bf16, not {ask.dtype}"
        if gpu.capability(ask.device) < (8, 0) or not torch.backends.cudnn.is_available():
            return "it needs compute capability 8.0 and cuDNN"
        if ask.width > (256 if WIDE and gpu.is_hopper(ask.device) else 128) or ask.width % 8:
            up_to = "up to 128 (256 on compute capability 9.0 from PyTorch 2.11 on)"
            return f"it needs K a multiple of 8 {up_to}, not {ask.width}"
        if ask.repeatable:
            return "its backward is not repeatable"
        return super().unsupported(ask)

    def suits(self, ask: Ask) -> bool:
        """It builds a plan for each new shape: not for documents of ever new lengths, nor for decoding. Of heads wider
        than 128 those of 256 channels alone were compared with fp64."""
        compared = ask.width != ask.value_width or ask.width <= 128 or ask.width == 256
        return gpu.from_hopper(ask.device) and not ask.packed and enough_rows(ask) and compared

    def takes_widths(self, ask: Ask) -> bool:
        return WIDE and gpu.is_hopper(ask.device) and (ask.width, ask.value_width) == LATENT

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tile: Tile) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, not tile.full, False, scale=scores.scale
        )
        return o.transpose(1, 2), lse.squeeze(-1) if lse.dim() == 4 else lse

    def tile_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.q.shape[1] == k.shape[1] == 1:  # cuDNN has no backward for one query and one key
            return _one_by_one(x, k, v, scores.scale)
        do, q, k, v, o = (t.transpose(1, 2) for t in (x.do, x.q, k, v, x.o))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        lse, lengths = x.lse.unsqueeze(-1).contiguous(), (None, None, q.shape[2], k.shape[2])
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, seed, None, *lengths, 0.0, not tile.full, scale=scores.scale
        )
        return tuple(g.transpose(1, 2) for g in grads)


def _one_by_one(x: QueryRows, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a tile of one query ``[B, 1, H, D]`` and one key ``[B, 1, Hk, D]``: a weight a head."""
    dtype, groups = x.q.dtype, k.shape[2]
    do, q, o = (t.float().unflatten(2, (groups, -1)) for t in (x.do, x.q, x.o))  # [B, 1, Hk, H // Hk, D]
    k, v = (t.float().unsqueeze(3) for t in (k, v))
    log_weight = scale * (q * k).sum(-1, keepdim=True) - x.lse.transpose(1, 2).unflatten(2, (groups, -1))[..., None]
    weight = log_weight.exp()
    score = scale * weight * (do * (v - o)).sum(-1, keepdim=True)
    return (score * k).flatten(2, 3).to(dtype), (score * q).sum(3).to(dtype), (weight * do).sum(3).to(dtype)
