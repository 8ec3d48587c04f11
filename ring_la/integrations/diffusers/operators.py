"""Split attention as a registered operator, so that torch.compile sees one node and no exchange.

    ring_la::diffusion_attention    q, k, v of this rank's tokens, whole sizes, the number of the model -> o

Without gradients: what needs them breaks its graph at `ring_la.attention` instead, which keeps what its backward takes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enter(model: Any) -> int:
    """A number under which the operator finds `model`, as long as that lives."""
    number = next(_numbers)
    _models[number] = model
    return number


@torch.library.custom_op("ring_la::diffusion_attention", mutates_args=())
def diffusion_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    model: int,
    streams: str,
    sizes: Sequence[int],
    masked: str,
    scale: float | None,
) -> Tensor:
    """Attention ``[B, T, H, D]`` of this rank's tokens of `streams` (names with commas between), of which there are
    `sizes` on all ranks, in the call of `model` that is under way. `mask` has the streams of `masked`."""
    return _models[model].attend_now((q, k, v), streams, sizes, mask, masked, scale).contiguous()


@diffusion_attention.register_fake
def _(q, k, v, mask, model, streams, sizes, masked, scale):
    return q.new_empty((*q.shape[:3], v.shape[3]))
