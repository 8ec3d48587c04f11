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
from ...kernels.fused.turned import relu_and_turn
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
    """q and k behind their norms, and v: ``[B, T, H, D]``."""
    q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    q = q if attn.norm_q is None else attn.norm_q(q)
    k = k if attn.norm_k is None else attn.norm_k(k)
    return q.unflatten(2, (attn.heads, -1)), k.unflatten(2, (attn.heads, -1)), v.unflatten(2, (attn.heads, -1))


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
    o = _attend(running, F.relu(q), F.relu(k), v)
    o = attn.to_out[1](attn.to_out[0](o.flatten(2)))
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
    (q, turned_q), (k, turned_k) = relu_and_turn(q, *rotary_emb), relu_and_turn(k, *rotary_emb)
    o = _attend(running, turned_q, turned_k, v, q, k)
    return attn.to_out[1](attn.to_out[0](o.flatten(2)))


LINEAR: dict[str, Callable[..., Tensor]] = {
    "SanaLinearAttnProcessor2_0": sana,
    "SanaLinearAttnProcessor3_0": sana_video,
}
"""By the name of the library's class."""
