"""Sparse attention that picks each token's keys by an index of pools or blocks: GLM-5-Next, Qwen4-Exp, MiniMax-M3.

GLM-5-Next's index vectors and latents are gathered; queries stay. The layers run their own forward: where they ask a
cache for earlier keys they get the whole sequence's, and what is visible follows from the documents. As in the library,
the choice is a mask ``[T_local, T]``. The blocks of Qwen4-Exp and MiniMax-M3 are chosen by `ring_la.indexers`, without
one.
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ....errors import UnsupportedError
from ....indexers import best_key_index, full_block_index
from ....layout import Layout
from ....softmax import sparse_attention
from ..call import ModelCall


class Documents:
    """The whole sequence as an indexed layer needs it.

    Attributes:
        cu_seqlens: offsets of the documents.
        tokens, positions: places of this rank's tokens in the sequence and in their documents, ``[T_local]``.
        every: position of every token in its document, ``[T]``.
        visible: which tokens each of this rank's may see, bool ``[T_local, T]``: its document's, up to itself.
    """

    def __init__(self, call: ModelCall, length: int, device: torch.device) -> None:
        self.call = call
        layout = call.layout or Layout(length, cu_seqlens=call.cu_seqlens)
        self.cu_seqlens, tokens, every = layout.cu_seqlens, layout.tokens(), torch.arange(layout.seq_len)
        same = layout.documents_of(tokens)[:, None] == layout.documents_of(every)
        self.visible = (same & (every <= tokens[:, None])).to(device)
        self.tokens, self.positions = tokens.to(device), layout.positions_of(tokens).to(device)
        self.every = layout.positions_of(every).to(device)

    @classmethod
    def of(cls, call: ModelCall, hidden_states: Tensor) -> Documents:
        """Those of a call, made once."""
        if call.documents is None:
            call.documents = cls(call, hidden_states.shape[1], hidden_states.device)
        return call.documents  # type: ignore[return-value]

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' rows of x along `dim`, in order."""
        return x if self.call.layout is None else self.call.layout.gather(x, dim)


class WholeSequence:
    """What an indexed layer sees as its cache: it answers with the keys of the whole sequence."""

    def __init__(self, documents: Documents) -> None:
        self.documents, self.keys = documents, None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, T_local, ·]`` → ``[B, H, T, ·]``."""
        both = self.documents.gather(torch.cat([keys, values], -1), 2)
        self.keys, values = both.split([keys.shape[-1], values.shape[-1]], -1)
        return self.keys, values

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Index vectors ``[B, T_local, ·]`` → ``[B, T, ·]``. No gradient passes through the choice."""
        return self.documents.gather(keys.detach(), 1)

    def get_seq_length(self) -> int:
        return self.documents.cu_seqlens[-1]

    @property
    def layers(self) -> WholeSequence:
        return self

    def __getitem__(self, layer_idx: int) -> WholeSequence:
        return self


class Masked:
    """In place of the registry of attention functions: the keys are whole here and the mask says everything."""

    @staticmethod
    def get_interface(name: str, eager: Callable) -> Callable:
        """PyTorch's attention, or the library's plain one where there are sinks."""

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **keywords) -> tuple[Tensor, ...]:
            if keywords.get("s_aux") is None:
                return sdpa_attention_forward(module, q, k, v, mask, **keywords)
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            return eager(module, q, k, v, mask, **keywords)

        return attend


class Overriding:
    """A module with some of its methods replaced, as the `self` of its own forward."""

    def __init__(self, module: Any, **methods: Any) -> None:
        self.__dict__.update(methods, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def forward(self, *args, **keywords):
        """The module's own forward, without its decorators."""
        return inspect.unwrap(type(self.module).forward)(self, *args, **keywords)


def forward_with(kind: type[nn.Module], functions: object) -> types.FunctionType:
    """The forward of a class, with this in place of the registry of attention functions."""
    own = inspect.unwrap(kind.forward)
    scope = {**own.__globals__, "ALL_ATTENTION_FUNCTIONS": functions}
    return types.FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)


# -- GLM-5-Next --------------------------------------------------------------------------------------------


def glm5_next_attention(call: ModelCall, layer: Any, hidden_states: Tensor, past_key_values=None, **keywords):
    """``Glm5NextTextAttention``: latents are gathered, not heads."""
    documents = Documents.of(call, hidden_states)
    return forward_with(type(layer), Masked)(layer, hidden_states, past_key_values=WholeSequence(documents), **keywords)


@torch.no_grad()
def glm5_next_indexer(call: ModelCall, layer: Any, *, past_key_values: WholeSequence, **keywords) -> Tensor:
    """``Glm5NextTextIndexer``: picks pools of `index_kpool` tokens, counted from each document's first."""
    documents = past_key_values.documents

    def get_visible_tokens(valid_keys: Tensor, q_length: int, current_length: int) -> Tensor:
        return documents.visible & valid_keys[:, None]

    def get_pooled_states(packed_states: Tensor) -> tuple[Tensor, ...]:
        parts, cu = [], documents.cu_seqlens
        for start, stop in zip(cu, cu[1:]):
            keys, indices, valid = layer.get_pooled_states(packed_states[:, start:stop])
            parts.append((keys, torch.where(indices < 0, indices, indices + start), valid))
        return tuple(torch.cat(part, 1) for part in zip(*parts))

    def append_visible_tail(topk_indices: Tensor, token_visible: Tensor, key_valid: Tensor) -> Tensor:
        count = (documents.positions + 1) % layer.index_kpool  # tokens since the last full pool
        offsets = torch.arange(layer.index_kpool - 1, device=count.device)
        tail = (documents.tokens + 1 - count)[:, None] + offsets
        tail = tail.masked_fill(offsets >= count[:, None], -1)
        return torch.cat([topk_indices, tail.expand(*topk_indices.shape[:2], -1)], -1)

    own = Overriding(
        layer,
        get_visible_tokens=get_visible_tokens,
        get_pooled_states=get_pooled_states,
        append_visible_tail=append_visible_tail,
    )
    return own.forward(past_key_values=past_key_values, **keywords)


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
            heads = (x.transpose(1, 2) for x in (q, k, v))
            how: dict[str, Any] = dict(block=picked.size, scale=scaling, **module._ring_la.call.split)
            return sparse_attention(*heads, picked.places, **how).o, None  # type: ignore[call-arg]

        return attend


def qwen4_exp_attention(
    call: ModelCall,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **keywords,
):
    """``Qwen4ExpTextAttention``, memory linear in this rank's tokens."""
    own = Overriding(layer, indexer=functools.partial(qwen4_exp_indexer, call, layer.indexer))
    forward = forward_with(type(layer), ByBlocks)
    return forward(own, hidden_states, position_embeddings, Everything(), past_key_values, **keywords)


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


MIXERS = {
    "MiniMaxM3VLAttention": minimax_m3_attention,
    "Glm5NextTextAttention": glm5_next_attention,
    "Glm5NextTextIndexer": glm5_next_indexer,
    "Qwen4ExpTextAttention": qwen4_exp_attention,
}
UNCACHED = {"Glm5NextTextAttention", "MiniMaxM3VLAttention", "Qwen4ExpTextAttention"}
