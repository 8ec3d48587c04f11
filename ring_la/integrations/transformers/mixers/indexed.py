"""Sparse attention that picks each token's keys by an index of all of them: GLM-5-Next and Qwen4-Exp.

What is picked depends on every earlier token, so index vectors, keys and values are gathered; queries stay. The layers
run their own forward: where they ask their cache for earlier keys they get the whole sequence's, and what is visible
follows from the documents. As in the library, the choice is a mask ``[T_local, T]``.
"""

from __future__ import annotations

import inspect
import types

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ....errors import UnsupportedError
from ....layout import Layout
from ..call import Call


class Documents:
    """The whole sequence as an indexed layer needs it.

    Attributes:
        cu_seqlens: offsets of the documents. tokens: this rank's tokens' places in the sequence, ``[T_local]``.
        visible: which tokens each of them may see, bool ``[T_local, T]``: its document's, up to itself.
    """

    def __init__(self, call: Call, length: int, device: torch.device) -> None:
        self.call = call
        layout = call.layout or Layout(length, cu_seqlens=call.cu_seqlens)
        self.cu_seqlens, tokens, every = layout.cu_seqlens, layout.tokens(), torch.arange(layout.seq_len)
        same = layout.documents_of(tokens)[:, None] == layout.documents_of(every)
        self.visible = (same & (every <= tokens[:, None])).to(device)
        self.tokens, self.positions = tokens.to(device), layout.positions_of(tokens).to(device)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' rows of x along `dim`, in order."""
        return x if self.call.layout is None else self.call.layout.gather(x, dim)


class WholeSequence:
    """What an indexed layer sees as its cache: it answers with the keys of the whole sequence."""

    def __init__(self, documents: Documents, cache: object) -> None:
        if cache is not None:
            raise UnsupportedError("use_cache", "False for a model with an indexer", "True")
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
    def get_interface(*_: object):
        return sdpa_attention_forward


class Overriding:
    """A module with some of its methods replaced, as the `self` of its own forward."""

    def __init__(self, module: nn.Module, **methods: object) -> None:
        self.__dict__.update(methods, module=module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.module, name)

    def forward(self, *args, **keywords):
        """The module's own forward, without its decorators."""
        return inspect.unwrap(type(self.module).forward)(self, *args, **keywords)


def masked_forward(layer: nn.Module) -> types.FunctionType:
    """The layer's own forward, with attention under an explicit mask."""
    own = inspect.unwrap(type(layer).forward)
    scope = {**own.__globals__, "ALL_ATTENTION_FUNCTIONS": Masked}
    return types.FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)


# -- GLM-5-Next --------------------------------------------------------------------------------------------


def glm5_next_attention(call: Call, layer: nn.Module, hidden_states: Tensor, past_key_values=None, **keywords):
    """``Glm5NextTextAttention``: latents are gathered, not heads."""
    documents = Documents(call, hidden_states.shape[1], hidden_states.device)
    return masked_forward(layer)(
        layer, hidden_states, past_key_values=WholeSequence(documents, past_key_values), **keywords
    )


@torch.no_grad()
def glm5_next_indexer(call: Call, layer: nn.Module, *, past_key_values: WholeSequence, **keywords) -> Tensor:
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


def qwen4_exp_attention(
    call: Call,
    layer: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    **keywords,
):
    """``Qwen4ExpTextAttention``: its indexer reads from the mask which tokens there are to pick from."""
    batch, length = hidden_states.shape[:2]
    documents = Documents(call, length, hidden_states.device)
    # keys' angles are read by their place in the sequence, queries' from the end
    angles = tuple(torch.cat([documents.gather(x, 1), x], 1).expand(batch, -1, -1) for x in position_embeddings)
    mask = documents.visible.expand(batch, 1, -1, -1)
    return masked_forward(layer)(
        layer, hidden_states, angles, mask, WholeSequence(documents, past_key_values), **keywords
    )


MIXERS = {
    "Glm5NextTextAttention": glm5_next_attention,
    "Glm5NextTextIndexer": glm5_next_indexer,
    "Qwen4ExpTextAttention": qwen4_exp_attention,
}
