"""RWKV-4: a weighted mean of values whose weights decay by channel, and token shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....conv import token_shift
from ....linear import CommonOptions
from ....recurrences import hgrn
from ....recurrences.stabiliser import stabiliser
from ..cache import Listed
from ..call import ModelCall
from .indexed import Overriding

NEVER = -1e4
"""The logarithm of no weight."""


def time_mixing(call: ModelCall, layer: Any, hidden: Tensor, state: Any = None, use_cache: bool = False):
    """``RwkvSelfAttention``: its projections of shifted tokens, `wkv`, and its output projection."""
    receptance, key, value, _ = _Shifting.of(call, layer, state, SHIFTED).extract_key_value(hidden)
    places = [] if state is None else [_listed(layer, place) for place in SUMS]
    before = [x for x in (place.get(state) for place in places) if x is not None]
    out, sums = wkv(call, layer.time_decay, layer.time_first, key, value, before, bool(places))
    for place, x in zip(places, sums):
        place.put(state, token_shift(x, output_final_state=True, **call.split).final_state)
    return layer.output(receptance * out), state


def channel_mixing(call: ModelCall, layer: Any, hidden: Tensor, state: Any = None):
    """``RwkvFeedForward``, which looks at the token before."""
    return _Shifting.of(call, layer, state, FED).forward(hidden)[0], state


def wkv(
    call: ModelCall, decay: Tensor, first: Tensor, key: Tensor, value: Tensor, before: Sequence[Tensor], keep: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """``rwkv_linear_attention`` of key and value ``[B, T, D]`` (Peng et al. 2023, arXiv 2305.13048, eq. 14).

    ``o_t = (Σ_{s<t} e^{−(t−1−s) w + k_s} v_s + e^{u + k_t} v_t) / (the same without v)``, w = e^decay, u = first. Both
    sums are states before a token's own write: those of shifted tokens. They are kept divided by e^m, m the logarithm
    of the largest weight; no result depends on m.

    `before` are both sums and m ``[B, D]`` behind earlier tokens, if there are. Returns o, and if wanted these behind
    each token ``[B, T, D]``.
    """
    k, v, w = key.float(), value.float(), decay.float().exp()
    step = before and call.layout is None and k.shape[1] == 1
    above, below, m = [x[:, None] for x in before] if step else _sums(call, w, k, v, before)
    own = first.float() + k
    largest = torch.maximum(m, own.detach())
    earlier, now = torch.exp(m - largest), torch.exp(own - largest)
    o = ((earlier * above + now * v) / (earlier * below + now)).to(key.dtype)
    return o, _behind(m - w, above, below, k, v) if keep else ()


def _sums(call: ModelCall, w: Tensor, k: Tensor, v: Tensor, before: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Both sums before each token's own write, and their m."""
    shifted = token_shift(torch.cat([k, v, torch.ones_like(k[..., :1])], -1), **call.split).o
    k_before, v_before, there = shifted.split([k.shape[-1], v.shape[-1], 1], -1)
    written = torch.where(there > 0, k_before, NEVER)
    f = (-w).expand_as(k)
    start, entering = _never(call, k), None
    if before:  # they have not decayed for the first token, and do so here
        start, entering = before[2].clamp(min=NEVER) + w, torch.cat([*before[:2]], -1)
    m = stabiliser(written, f, start, CommonOptions(**call.split))
    after = m.after.float()
    weight = there * torch.exp(written - after)
    g = f + torch.minimum((m.before - m.after).float(), -f.detach())  # never above zero by a rounding
    tokens = torch.cat([weight * v_before, weight], -1), torch.cat([g, g], -1)
    above, below = hgrn(*tokens, initial_state=entering, **call.split).o.chunk(2, -1)
    return above, below, after


def _behind(m: Tensor, above: Tensor, below: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Both sums behind each token, and their m, given those before it; m has decayed."""
    largest = torch.maximum(m, k)
    old, new = torch.exp(m - largest), torch.exp(k - largest)
    return old * above + new * v, old * below + new, largest


def _never(call: ModelCall, like: Tensor) -> Tensor:
    """m before each document: nothing has been written."""
    layout, cu = call.layout, call.split.get("cu_seqlens")
    documents = like.shape[0] if cu is None else cu.numel() - 1
    if layout is not None and layout.packed:
        documents = layout.num_documents
    return like.new_full((documents, like.shape[-1]), NEVER)


FED, SHIFTED, SUMS = 0, 1, (2, 3, 4)
"""Places in the library's list of states: the last tokens that were fed forward, and mixed in time; sums over v and
without it, and the logarithm of what they are divided by."""


def _listed(layer: Any, place: int) -> Listed:
    return Listed(layer.layer_idx, place, layer.config.num_hidden_layers, 5)


class _Shifting(Overriding):
    """`Overriding` with a shift over the split sequence, for a method that the forward calls, too."""

    @classmethod
    def of(cls, call: ModelCall, layer: Any, state: Any, place: int) -> _Shifting:
        """The layer, whose last token is to be found and left at a place of a state that is not None."""

        def shift(x: Tensor) -> Tensor:
            if state is None:
                return token_shift(x, **call.split).o
            listed = _listed(layer, place)
            out = token_shift(x, initial_state=listed.get(state), output_final_state=True, **call.split)
            listed.put(state, out.final_state)
            return out.o

        return cls(layer, time_shift=shift)

    def extract_key_value(self, hidden: Tensor) -> Any:
        return type(self.module).extract_key_value(self, hidden)


MIXERS = {"RwkvSelfAttention": time_mixing, "RwkvFeedForward": channel_mixing}
OURS_WITH_CACHE = {*MIXERS}
"""The library's steps of several sequences mix them."""
