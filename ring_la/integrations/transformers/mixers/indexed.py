"""Sparse attention that picks each token's keys by an index of pools or blocks: GLM-5-Next, Qwen4-Exp, MiniMax-M3.

The layers run their own forward. Where they ask an indexer they get places in the whole sequence, chosen by
`ring_la.indexers` for some tokens at a time; where they ask for attention, these go to `sparse_attention`, and with
GLM-5-Next's latents to `mla`. Index vectors go to every rank, and no mask is made.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from ....errors import UnsupportedError
from ....indexers import best_key_index, full_block_index
from ....indexers.blocks import Blocks
from ....indexers.chosen import Rows, best
from ....softmax import mla, sparse_attention
from ..attention import refuse_narrow_keys
from ..call import ModelCall
from ..names import takes_cache


class Overriding:
    """A module with some of its methods replaced, as the `self` of its own forward."""

    def __init__(self, module: Any, **methods: Any) -> None:
        for name, method in {**methods, "module": module}.items():
            object.__setattr__(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)  # what a layer is to keep outlasts this

    def forward(self, *args, **keywords):
        """The module's own forward, without its decorators."""
        return inspect.unwrap(type(self.module).forward)(self, *args, **keywords)


_forwards: dict[type, dict[type, types.FunctionType]] = {}
"""By what stands for attention, and class: made in an eager call, since torch.compile makes no function."""


def forward_with(kind: Any, functions: type) -> types.FunctionType:
    """The forward of a class, with this in place of the registry of attention functions."""
    if functions not in _forwards:
        _forwards[functions] = {}
    if kind not in _forwards[functions]:
        own = inspect.unwrap(kind.forward)
        scope = {**own.__globals__, "ALL_ATTENTION_FUNCTIONS": functions}
        del scope["__name__"]  # as in `make_forward`, with a code object of its own
        made = types.FunctionType(own.__code__.replace(), scope, own.__name__, own.__defaults__, own.__closure__)
        made.__kwdefaults__ = own.__kwdefaults__
        _forwards[functions][kind] = made
    return _forwards[functions][kind]


# -- Qwen4-Exp ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Picked:
    """What stands for a mask: the first token of each block a token reads, ``[B, T, heads, S]``, and its tokens."""

    places: Tensor
    size: int


class Everything:
    """A mask that hides nothing but what documents and order hide: what an index adds to it is all there is."""

    dtype = torch.bool

    def is_floating_point(self) -> bool:
        return False

    def __and__(self, picked: Picked) -> Picked:
        return picked


class ByBlocks:
    """In place of the registry of attention functions: the mask, or `block_indices`, says which blocks are read."""

    @staticmethod
    def get_interface(name: str, eager: Callable) -> Callable:
        def attend(
            module: Overriding, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, scaling: float, **more
        ) -> tuple[Tensor, None]:
            picked = more.get("block_indices") or mask
            if dropout:
                raise UnsupportedError("attention_dropout", "0 where an index picks the keys", dropout)
            refuse_narrow_keys(module)
            heads = (x.transpose(1, 2) for x in (q, k, v))
            how: dict[str, Any] = dict(block=picked.size, scale=scaling, **module._ring_la.call.split)
            return sparse_attention(*heads, picked.places, **how).o, None  # type: ignore[call-arg]

        return attend


@takes_cache
def qwen4_exp_attention(
    call: ModelCall,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **keywords,
):
    """``Qwen4ExpTextAttention``, memory linear in this rank's tokens."""
    own = Overriding(layer, indexer=functools.partial(qwen4_exp_indexer, call, layer.indexer))
    forward = forward_with(type(layer), ByBlocks)
    return forward(own, hidden_states, position_embeddings, Everything(), cache, **keywords)


def qwen4_exp_indexer(
    call: ModelCall, layer: Any, hidden_states: Tensor, angles: tuple[Tensor, Tensor], *_: object
) -> Picked:
    """``Qwen4ExpTextQSAIndexer``: the `block_topk` full blocks of `compress_ratio` tokens before each token whose mean
    key scores highest, and what follows the last full one. Blocks are counted from each document's first token."""
    rotate = inspect.unwrap(type(layer).forward).__globals__["apply_rotary_pos_emb"]
    with torch.no_grad():
        qk = layer.index_qk_proj(hidden_states).unflatten(-1, (-1, layer.index_head_dim))
        q, k = qk.split([layer.index_n_heads, layer.index_kv_heads], 2)
        cos, sin = angles
        q = rotate(layer.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2)

        def pool(means: Tensor, first: Tensor) -> Tensor:
            cos, sin = ((x if call.layout is None else call.layout.gather(x, 1))[:, first] for x in angles)
            return rotate(layer.k_layernorm(means)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]

        size = layer.compress_ratio
        return Picked(full_block_index(q, k[:, :, 0], size, layer.block_topk, pool=pool, **call.split).places, size)


# -- MiniMax-M3 --------------------------------------------------------------------------------------------


def minimax_m3_attention(call: ModelCall, layer: Any, *args, **keywords):
    """``MiniMaxM3VLAttention``; layers without an index read everything."""
    if layer.indexer is None:
        return inspect.unwrap(type(layer).forward)(layer, *args, **keywords)
    own = Overriding(layer, indexer=functools.partial(minimax_m3_indexer, call, layer.indexer))
    return forward_with(type(layer), ByBlocks)(own, *args, **keywords)


def minimax_m3_indexer(
    call: ModelCall, layer: Any, hidden_states: Tensor, angles: tuple[Tensor, Tensor], *_: object
) -> Picked:
    """``MiniMaxM3VLIndexer``: for each key head the blocks with the best single key, and those just before."""
    rotate = inspect.unwrap(type(layer).forward).__globals__["apply_rotary_pos_emb"]
    with torch.no_grad():
        both = ((layer.q_proj, layer.q_norm), (layer.k_proj, layer.k_norm))
        heads = (norm(project(hidden_states).unflatten(-1, (-1, layer.head_dim))) for project, norm in both)
        q, k = rotate(*(x.transpose(1, 2) for x in heads), *(x[..., : layer.head_dim] for x in angles))
        size, how = layer.block_size, dict(local=layer.local_blocks, **call.split)
        return Picked(best_key_index(q.transpose(1, 2), k[:, 0], size, layer.topk_blocks, **how).places, size)


# -- GLM-5-Next --------------------------------------------------------------------------------------------


class Pooled:
    """In place of the registry of attention functions: the mask says which pools are read; keys are latents, or what a
    ``kv_b_proj`` that is more than a matrix made of them."""

    @staticmethod
    def get_interface(name: str, eager: Callable) -> Callable:
        def attend(
            module: Overriding, q: Tensor, k: Tensor, v: Tensor, mask: Picked, dropout: float, scaling: float, **more
        ) -> tuple[Tensor, None]:
            if dropout:
                raise UnsupportedError("attention_dropout", "0 where an index picks the keys", dropout)
            refuse_narrow_keys(module)
            how: dict[str, Any] = dict(block=mask.size, scale=scaling, sinks=more.get("s_aux"))
            how |= module._ring_la.call.split
            if not is_matrix(module.kv_b_proj):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return sparse_attention(q, k, v, mask.places, **how).o, None
            N, V = module.qk_nope_head_dim, module.v_head_dim
            up = module.kv_b_proj.weight.unflatten(0, (-1, N + V)).split([N, V], 1)
            return mla(q.transpose(1, 2), k[:, 0], v[:, 0], *up, chosen=mask.places, **how).o, None

        return attend


def is_matrix(up: nn.Module) -> bool:
    """Whether a projection is one whole matrix: no adapter, not quantised, not sharded by itself."""
    return type(up) is nn.Linear and up.bias is None and not isinstance(up.weight, DTensor)


@takes_cache
def glm5_next_attention(call: ModelCall, layer: Any, hidden_states: Tensor, cache=None, **keywords):
    """``Glm5NextTextAttention``: latents travel, and memory is linear in this rank's tokens."""
    methods: dict[str, Any] = dict(build_attention_mask_from_topk=lambda topk_indices, **_: topk_indices)
    if layer.indexer is not None:
        methods["indexer"] = functools.partial(glm5_next_indexer, call, layer.indexer)
    if is_matrix(layer.kv_b_proj):
        methods["expand_kv"] = lambda latent, rotary: (latent, rotary)
    return forward_with(type(layer), Pooled)(Overriding(layer, **methods), hidden_states, **keywords)


@torch.no_grad()
def glm5_next_indexer(call: ModelCall, layer: Any, hidden_states: Tensor, q_resid: Tensor, **_: object) -> Picked:
    """``Glm5NextTextIndexer``: pools of `index_kpool` tokens, counted from each document's first, whose learned mean
    key scores highest; and what follows the last full one."""
    size, few = layer.index_kpool, layer.index_topk // layer.index_kpool
    q = layer.wq_b(q_resid).unflatten(-1, (-1, layer.head_dim)).float()
    k, gate = layer.k_norm(layer.wk(hidden_states)), linear(hidden_states, layer.index_kpool_compress_gate)
    w = layer.weights_proj(hidden_states.to(layer.weights_proj.weight.dtype)).float() * layer.n_heads**-0.5
    rows = Rows.of(hidden_states, call.layout, call.cu_seqlens)
    blocks = Blocks.of(size, rows)
    k, gate = rows.gather(torch.cat([k, gate], -1)).chunk(2, -1)
    keys = _learned_means(k, gate, layer.index_kpool_compress_ape, blocks)

    def score(strip: slice, some: slice) -> Tensor:
        s = torch.relu(torch.einsum("bnhd,bmd->bnhm", q[:, strip], keys[:, some]) * layer.softmax_scale)
        full = (blocks.first[some] + size - 1 <= rows.tokens[strip, None]) & blocks.whole[some]
        here = blocks.number[some] >= blocks.of_document[strip, None]
        return (w[:, strip, None] @ s)[:, :, 0].masked_fill(~(full & here), -torch.inf)[:, :, None]

    places = blocks.places(best(score, len(blocks), blocks.ends, (len(q), q.shape[2]), max(1, few)).places)[..., :few]
    if layer.index_kpool_always_select_tail:
        own = blocks.first[blocks.own]
        tail = torch.where(rows.tokens - own == size - 1, -1, own).int()
        places = torch.cat([places, tail[None, :, None, None].expand(len(q), -1, -1, -1)], -1)
    return Picked(places, size)


def _learned_means(keys: Tensor, gate: Tensor, place: Tensor, blocks: Blocks) -> Tensor:
    """The key of each pool ``[B, pools, D]``, of the whole sequence's ``[B, T, D]``: a mean with weights of each
    channel's. Those of pools that are not full are no keys."""
    at = (blocks.first[:, None] + torch.arange(len(place), device=keys.device)).clamp_(max=keys.shape[1] - 1)
    weights = (gate[:, at].float() + place.float()).softmax(2).to(keys.dtype)
    return (weights * keys[:, at]).sum(2).float()


MIXERS = {
    "MiniMaxM3VLAttention": minimax_m3_attention,
    "Glm5NextTextAttention": glm5_next_attention,
    "Qwen4ExpTextAttention": qwen4_exp_attention,
}
UNCACHED = {"Glm5NextTextAttention", "MiniMaxM3VLAttention", "Qwen4ExpTextAttention"}
