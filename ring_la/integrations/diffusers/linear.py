"""The library's processors of linear attention, over the tokens of all ranks: one sum of states a layer.

    SANA         o = S q / (Σ k · q),   S = Σ v kᵀ,   q and k behind a ReLU
    SANA-Video   the same, q and k of S rotated, those of the denominator not

Sums are fp32 whatever the tokens are, as the library's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...context import GridLayout
from ...recurrences import linear_attention
from . import operators
from .call import DenoiserCall

EPS = 1e-15


class Running(Protocol):
    """What knows the call that is under way."""

    call: DenoiserCall
    number: int


def linear_class(kind: type, running: Running) -> type:
    """The same class of processors, over the tokens of all ranks."""
    compute = LINEAR[kind.__name__]

    @functools.wraps(kind.__call__)  # the library asks for the names of its arguments
    def call(self, attn: nn.Module, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return compute(running, attn, hidden_states, *args, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "ring_la": True})


def _projected(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k behind their norms and a ReLU, and v: ``[B, T, H, D]``."""
    q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    q = q if attn.norm_q is None else attn.norm_q(q)
    k = k if attn.norm_k is None else attn.norm_k(k)
    q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (q, k, v))
    return F.relu(q), F.relu(k), v


def _attend(
    running: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer_q: Tensor | None = None,
    normalizer_k: Tensor | None = None,
) -> Tensor:
    if torch.compiler.is_compiling():
        return operators.diffusion_linear(q, k, v, normalizer_q, normalizer_k, running.number)
    return split_linear(running.call.grid, q, k, v, normalizer_q, normalizer_k)


def split_linear(
    grid: GridLayout | None, q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor | None, normalizer_k: Tensor | None
) -> Tensor:
    """Linear attention ``[B, T, H, D]`` over the tokens of all ranks, by one sum of states."""
    own: dict[str, Any] = dict(normalizer_q=normalizer_q, normalizer_k=normalizer_k)
    return linear_attention(q, k, v, causal=False, normalize=True, scale=1.0, eps=EPS, layout=grid, **own).o


def sana(
    running: Running,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """SanaLinearAttnProcessor2_0."""
    q, k, v = _projected(attn, hidden_states)
    o = attn.to_out[1](attn.to_out[0](_attend(running, q, k, v).flatten(2)))
    return o.clip(-65504, 65504) if o.dtype == torch.float16 else o


def sana_video(
    running: Running,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """SanaLinearAttnProcessor3_0."""
    q, k, v = _projected(attn, hidden_states)
    o = _attend(running, _rotate(q, *rotary_emb), _rotate(k, *rotary_emb), v, q, k)
    return attn.to_out[1](attn.to_out[0](o.flatten(2)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned by their angles, ``[B, T, 1, D]`` each twice."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)  # as the library: each half is rounded where it is written
    out[..., 0::2], out[..., 1::2] = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    return out


LINEAR: dict[str, Callable[..., Tensor]] = {
    "SanaLinearAttnProcessor2_0": sana,
    "SanaLinearAttnProcessor3_0": sana_video,
}
"""By the name of the library's class."""
