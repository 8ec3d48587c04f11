"""Multi-head latent attention: DeepSeek-V2 and -V3, Kimi-Linear, Ling 2.5, GLM-4.7-Flash, MiniCPM3 and their like.

Their forward asks ``expand_kv(latent, rotary)`` for keys and values and gives these to an attention function. Here it
gets latents back, and the attention function makes keys and values of them where they arrive: latents travel.

With DeepSeek's sparse attention (DSA: V3.2, GLM-MoE-DSA, HY-V4, A.X-K2, Dots3-Note, Mistral Large 4) an indexer picks
the keys each token reads, over the whole sequence: index keys go to every rank, scores exist for some tokens at a time,
and what is picked goes to the attention function as places in the sequence.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....errors import UnsupportedError
from ....indexers import lightning_index
from ..attention import attend_latents
from ..call import ModelCall
from ..names import cache_of, takes_cache
from .indexed import Overriding, forward_with, is_matrix


class Latents:
    """In place of the registry of attention functions: what comes for keys and values are latents."""

    @staticmethod
    def get_interface(name: str, eager: Callable) -> Callable:
        return attend_latents


def as_they_are(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``."""
    return latent, rotary


def latent_attention(call: ModelCall, layer: Any, *args, **keywords):
    """A layer with ``expand_kv``. Where its ``kv_b_proj`` is more than one whole matrix (an adapter, quantised, sharded
    by itself), or an older version of the library puts expanded keys into its cache, it runs as it is, and expanded
    keys travel."""
    kind: Any = type(layer)
    if getattr(layer, "indexer", None) is not None:
        picking = pick_scaled if hasattr(layer.indexer, "softmax_scaling") else pick
        layer = Overriding(layer, indexer=functools.partial(picking, call, layer.indexer))
    cached = cache_of(keywords) is not None
    if not is_matrix(layer.kv_b_proj) or not _expands(kind) or (cached and not caches_latents(kind)):
        return inspect.unwrap(kind.forward)(layer, *args, **keywords)
    return forward_with(kind, Latents)(Overriding(layer, expand_kv=as_they_are), *args, **keywords)


@functools.cache
def _source(kind: Any) -> str:
    return inspect.getsource(inspect.unwrap(kind.forward))


@torch.compiler.assume_constant_result
def _expands(kind: Any) -> bool:
    """Whether a class's forward makes keys and values by ``expand_kv``."""
    return "self.expand_kv(" in _source(kind)


@torch.compiler.assume_constant_result
def caches_latents(kind: Any) -> bool:
    """Whether what it puts into a cache are latents."""
    source = _source(kind)
    update = re.search(r"\b(cache|past_key_values)\.update\(", source)
    return update is not None and update.start() < source.find("self.expand_kv(")


def latent_layers(model: nn.Module) -> dict[int, bool]:
    """The numbers of a model's layers with latents, and whether their rotary keys come out turned by halves though the
    projection has them in pairs.

    Raises:
        UnsupportedError: this version of Transformers keeps keys and values of them, of which no other engine has a
            place.
    """
    layers: dict[int, bool] = {}
    module: Any
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__ in MIXERS and hasattr(module, "expand_kv"):
            if not caches_latents(kind):
                raise UnsupportedError("transformers", "a version that keeps latents", "one that keeps keys and values")
            halves = "apply_rotary_pos_emb_interleave(" in inspect.getsource(inspect.unwrap(kind.forward))
            config: Any = module.config
            layers[int(module.layer_idx)] = halves and getattr(config, "rope_interleave", True) is not False
    return layers


def in_pairs(x: Tensor) -> Tensor:
    """Rotary keys ``[..., R]`` whose first and second numbers lie in halves, each beside the other."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@takes_cache
def pick(
    call: ModelCall,
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: object,
    position_ids: object = None,
    cache: Any = None,
) -> Tensor:
    """In place of an indexer: places in the sequence of the tokens that each of this rank's reads, ``[B, T, topk]``."""
    with torch.no_grad():
        q, k = index_vectors(indexer, hidden_states, q_resid, position_embeddings)
        if cache is not None:
            k = cache.update_indexer(k, indexer.layer_idx)
        return _picked(call, indexer, q, k, hidden_states)


def _picked(call: ModelCall, indexer: Any, q: Tensor, k: Tensor, hidden_states: Tensor) -> Tensor:
    w = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    w = w * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return lightning_index(q, k, w, indexer.index_topk, **call.split).places[:, :, 0]


@takes_cache
def pick_scaled(
    call: ModelCall,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: object,
    position_ids: Tensor,
    cache: Any = None,
) -> Tensor:
    """The same of ``MistralLarge4TextIndexer``: queries come from the layer's input and grow with their positions, and
    in some layers nothing is rotated."""
    R, D = indexer.qk_rope_head_dim, indexer.head_dim
    with torch.no_grad():
        q = indexer.wq_b(indexer.q_input_norm(hidden_states)).unflatten(-1, (-1, D))
        q = indexer.softmax_scaling(q, position_ids, head_dim_first=False)
        k = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
        if indexer.use_rope:
            rotate = inspect.unwrap(type(indexer).forward).__globals__["apply_rotary_pos_emb_interleave"]
            turned = rotate(q[..., :R], k[..., :R], *position_embeddings, unsqueeze_dim=2)
            q, k = (torch.cat([a, x[..., R:]], -1) for a, x in zip(turned, (q, k)))
        return _picked(call, indexer, q, k[:, :, 0], hidden_states)


def index_vectors(
    indexer: Any, hidden_states: Tensor, q_resid: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Index queries ``[B, T, Hi, D]`` and keys ``[B, T, D]``, rotated."""
    how = next(how for name, how in INDEXERS.items() if name in {c.__name__ for c in type(indexer).__mro__})
    rotate = inspect.unwrap(type(indexer).forward).__globals__[how.rotation]
    R, D, norm = indexer.qk_rope_head_dim, indexer.head_dim, indexer.k_norm
    q = indexer.wq_b(q_resid).unflatten(-1, (-1, D))
    k = norm(indexer.wk(hidden_states).to(norm.weight.dtype)).to(hidden_states.dtype)[:, :, None]
    start, rest = (0, slice(R, None)) if how.first else (D - R, slice(0, D - R))
    turned = rotate(*(x[..., start : start + R] for x in (q, k)), *angles, unsqueeze_dim=2)
    both = [(a, x[..., rest]) if how.first else (x[..., rest], a) for a, x in zip(turned, (q, k))]
    q, k = (torch.cat(parts, -1) for parts in both)
    return q, k[:, :, 0]


class Rotated(NamedTuple):
    """Which function rotates index vectors, and whether their first channels or their last ones."""

    rotation: str
    first: bool = True


INDEXERS = {
    "DeepseekV32Indexer": Rotated("apply_rotary_pos_emb"),
    "AXK2Indexer": Rotated("apply_rotary_pos_emb"),
    "GlmMoeDsaIndexer": Rotated("apply_rotary_pos_emb_interleave"),
    "Dots3NoteTextIndexer": Rotated("apply_rotary_pos_emb_interleave"),
    "HYV4Indexer": Rotated("apply_rotary_pos_emb", first=False),
    "HYV4VLIndexer": Rotated("apply_rotary_pos_emb", first=False),
}
DSA = (
    "AXK2Attention",
    "DeepseekV32Attention",
    "Dots3NoteTextAttention",
    "GlmMoeDsaAttention",
    "HYV4Attention",
    "HYV4VLAttention",
    "MistralLarge4TextAttention",
)

CLASSES = (
    "AXK1Attention",
    "BailingHybridAttention",
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "Glm4MoeLiteAttention",
    "KimiLinearAttention",
    "LongcatFlashMLA",
    "MiniCPM3Attention",
    "Mistral4Attention",
    "YoutuAttention",
)

MIXERS = dict.fromkeys((*CLASSES, *DSA), latent_attention)
UNCACHED = {"MistralLarge4TextAttention"}
"""Layers that read the latents of others."""
