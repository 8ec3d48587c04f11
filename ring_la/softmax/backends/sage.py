"""SageAttention (arXiv 2410.02367, 2411.10958): queries and keys in INT8, probabilities and values in FP8 or fp16.

The package's own function picks the kernel of the GPU. It has no gradients. It has not been run with ring_la, whose
adapter is tested against a stand-in with its signature (2.2), so a call takes it only where it names it. Versions
before 2 give outputs alone, which cannot be merged with those of other blocks; they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ..geometry import Tile
from ..scores import Scores
from .backend import Ask, QueryRows, TileBackend
from .flash_attn import missing
from .varlen import HALVES


class SageAttention(TileBackend):
    """sageattention.sageattn."""

    name = "sage"
    module = "sageattention"
    forward_only = True
    devices: tuple[str, ...] = ("cuda",)

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type not in self.devices:
            return "tensors are not on a CUDA device"
        if ask.dtype not in HALVES:
            return f"it needs fp16 or bf16, not {ask.dtype}"
        if ask.width > 128:
            return f"it needs K up to 128, not {ask.width}"
        return super().unsupported(ask) or missing(self.module) or self._without_sums()

    def suits(self, ask: Ask) -> bool:
        return False

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tile: Tile) -> tuple[Tensor, Tensor]:
        how = dict(tensor_layout="NHD", is_causal=not tile.full, sm_scale=scores.scale, return_lse=True)
        return self._function(q, k, v, **how)

    def tile_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise UnsupportedError("backend", "a kernel with gradients", "'sage'")

    @property
    def _function(self) -> Callable[..., Any]:
        return import_module(self.module).sageattn

    def _without_sums(self) -> str:
        """That the package is too old to return lse: version 1 takes any keyword, and ignores this one."""
        if "return_lse" in signature(self._function).parameters:
            return ""
        return "sageattention.sageattn has no return_lse, as before version 2, and blocks are merged by it"
