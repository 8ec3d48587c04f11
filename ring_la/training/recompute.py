"""Activation checkpointing by kind of layer: what is recomputed in the backward pass instead of kept.

A block keeps its layer's and its MLP's activations, or one of the two, or neither. Softmax attention is dear to
recompute on long sequences (its time grows with T², its memory with T); recurrences and MLPs are cheap. Of an attention
layer that is recomputed, the result alone may be kept: 2 H V + 4 H bytes a token in bf16 save that time. Recomputing
under a split sequence exchanges again, so every rank has to recompute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import ArgumentError, UnsupportedError
from ..models import HybridLM
from ..nn import LAYERS, MixtureOfExperts, MoEOutput
from ..softmax.results import Kept
from .offload import Offload


def recompute(
    model: HybridLM, kinds: Collection[str], *, mlp_chunk: int | None = None, keep_attention: bool = False
) -> HybridLM:
    """Recompute parts of `model` in the backward pass. In place; before `shard_parameters`.

    Args:
        kinds: names from `LAYERS`: these layers and the norms before them, which keep one tensor each; "mlp": the same
            of the MLPs; "block": whole blocks of any kind, which keep one tensor; "norm": norms of what is kept else.
        mlp_chunk: an MLP takes at most this many tokens at a time, forward and backward, so that its inner activations
            are that few too. Within "block" that computes it a third time.
        keep_attention: results of softmax attention in what is recomputed are kept (`attention_kept`).

    Raises:
        ArgumentError: a name that is none. UnsupportedError: chunks of a mixture of experts.
    """
    for kind in kinds:
        if kind not in ("mlp", "block", "norm", *LAYERS):
            raise ArgumentError("kinds", f"'mlp', 'block', 'norm' or names out of {', '.join(LAYERS)}", repr(kind))
    if mlp_chunk is not None and mlp_chunk < 1:
        raise ArgumentError("mlp_chunk", "an int ≥ 1", mlp_chunk)
    if mlp_chunk is not None and any(isinstance(block.mlp, MixtureOfExperts) for block in model.blocks):
        raise UnsupportedError("mlp_chunk", "None with a mixture of experts", mlp_chunk)
    # methods of these objects are replaced, so that parameters' names, hooks and types stay
    again = partial(kept, attention=keep_attention)
    block: Any
    for name, block in zip(model.config.layers, model.blocks):
        if mlp_chunk is not None:
            block.mix_channels = partial(in_chunks, kept(block.mix_channels), mlp_chunk)
        if "block" in kinds:
            block.forward = again(block.forward)
            continue
        if name in kinds:
            block.mix_tokens = again(block.mix_tokens)
        elif "norm" in kinds:
            block.layer_norm.forward = kept(block.layer_norm.forward)
        if mlp_chunk is None and "mlp" in kinds:
            block.mix_channels = kept(block.mix_channels)
        elif mlp_chunk is None and "norm" in kinds:
            block.mlp_norm.forward = kept(block.mlp_norm.forward)
    if "norm" in kinds:
        norm: Any = model.norm
        norm.forward = kept(norm.forward)
    return model


def kept(call: Callable[..., Any], attention: bool = False) -> Callable[..., Any]:
    """`call`, of which only the arguments are kept for the backward pass, and the results of its softmax attention."""
    contexts: dict[str, Any] = {"context_fn": attention_kept} if attention else {}
    return partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False, **contexts)


def attention_kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Let what is recomputed keep the results of its softmax attention: `torch.utils.checkpoint`'s `context_fn`.

        checkpoint(layer, x, use_reentrant=False, context_fn=attention_kept)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attention_kept})     # Transformers

    All calls of `attention`, `mla` and `sparse_attention` in it keep o and lse, 2 H V + 4 H bytes a token in bf16, and
    compute neither again; within `Offload` in host memory. Calls in compiled code do not.
    """
    offload = Offload.around()
    results = Kept() if offload is None else Kept(offload.pack, offload.unpack)
    return results.made(), results.again()


def in_chunks(mix_channels: Callable[..., MoEOutput], chunk: int, x: Tensor, **keywords: Any) -> MoEOutput:
    """`mix_channels` over at most `chunk` tokens of ``x [B, T, D]`` at a time."""
    return MoEOutput(torch.cat([mix_channels(part, **keywords).o for part in x.split(chunk, 1)], 1), None)
