"""Activation checkpointing by kind of layer: what is recomputed in the backward pass instead of kept.

A block keeps its layer's and its MLP's activations, or one of the two, or neither. Softmax attention is dear to
recompute on long sequences (its time grows with T², its memory with T); recurrences and MLPs are cheap. Recomputing
under a split sequence exchanges again, so every rank has to recompute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import ArgumentError, UnsupportedError
from ..models import HybridLM
from ..nn import LAYERS, MixtureOfExperts, MoEOutput


def recompute(model: HybridLM, kinds: Collection[str], *, mlp_chunk: int | None = None) -> HybridLM:
    """Recompute parts of `model` in the backward pass. In place; before `shard_parameters`.

    Args:
        kinds: names from `LAYERS`: these layers and the norms before them, which keep one tensor each; "mlp": the same
            of the MLPs; "block": whole blocks of any kind, which keep one tensor; "norm": norms of what is kept else.
        mlp_chunk: an MLP takes at most this many tokens at a time, forward and backward, so that its inner activations
            are that few too. Within "block" that computes it a third time.

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
    block: Any
    for name, block in zip(model.config.layers, model.blocks):
        if mlp_chunk is not None:
            block.mix_channels = partial(in_chunks, kept(block.mix_channels), mlp_chunk)
        if "block" in kinds:
            block.forward = kept(block.forward)
            continue
        if name in kinds:
            block.mix_tokens = kept(block.mix_tokens)
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


def kept(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, of which only the arguments are kept for the backward pass."""
    return partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)


def in_chunks(mix_channels: Callable[..., MoEOutput], chunk: int, x: Tensor, **keywords: Any) -> MoEOutput:
    """`mix_channels` over at most `chunk` tokens of ``x [B, T, D]`` at a time."""
    return MoEOutput(torch.cat([mix_channels(part, **keywords).o for part in x.split(chunk, 1)], 1), None)
