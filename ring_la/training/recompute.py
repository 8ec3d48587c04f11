"""Activation checkpointing by kind of layer: what is recomputed in the backward pass instead of kept.

A block keeps its layer's and its MLP's activations, or one of the two, or neither. Softmax attention is dear to
recompute on long sequences (its time grows with T², its memory with T); recurrences and MLPs are cheap. Of an attention
layer that is recomputed, the result alone may be kept: 2 H V + 4 H bytes a token in bf16 save that time. Recomputing
under a split sequence exchanges again, so every rank has to recompute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_flag
from ..errors import ArgumentError, UnsupportedError
from ..models import HybridLM
from ..nn import LAYERS, MixtureOfExperts, MoEOutput
from ..nn.layer import positive
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
            are that few too.
        keep_attention: results of softmax attention in what is recomputed are kept (`attention_kept`).

    Raises:
        ArgumentError: a name that is none, or another model. UnsupportedError: chunks of a mixture of experts.
    """
    if not hasattr(getattr(model, "config", None), "layers"):
        expected = "a HybridLM (models of Transformers have gradient_checkpointing_enable)"
        raise ArgumentError("model", expected, type(model).__name__)
    if isinstance(kinds, str) or not isinstance(kinds, Collection):
        raise ArgumentError("kinds", "a list of names", repr(kinds))
    check_flag("keep_attention", keep_attention)
    for kind in kinds:
        if kind not in ("mlp", "block", "norm", *LAYERS):
            raise ArgumentError("kinds", f"'mlp', 'block', 'norm' or names out of {', '.join(LAYERS)}", repr(kind))
    if mlp_chunk is not None:
        positive("mlp_chunk", mlp_chunk)
    if mlp_chunk is not None and any(isinstance(block.mlp, MixtureOfExperts) for block in model.blocks):
        raise UnsupportedError("mlp_chunk", "None with a mixture of experts", mlp_chunk)
    # methods of these objects are replaced, so that parameters' names, hooks and types stay
    again = partial(kept, contexts=attention_kept if keep_attention else None)
    block: Any
    for name, block in zip(model.config.layers, model.blocks):
        if mlp_chunk is not None:
            block.mix_channels = partial(in_chunks, block.mix_channels, mlp_chunk)
        if "block" in kinds:
            block.forward = kept(block.forward, partial(_whole, keep_attention))
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


Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""Of a forward pass, and of each that does the same again."""


def kept(call: Callable[..., Any], contexts: Callable[[], Contexts] | None = None) -> Callable[..., Any]:
    """`call`, of which only the arguments are kept for the backward pass, and what `contexts` keep."""
    around: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False, **around)


def attention_kept() -> Contexts:
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
    """`mix_channels` over at most `chunk` tokens of ``x [B, T, D]`` at a time, each computed again for its gradients.

    Where a whole block is computed again, what its chunks take is all that is needed: each is then computed for its own
    backward pass.
    """
    part_of = kept(_nothing if _AGAIN.get() else mix_channels)
    return MoEOutput(torch.cat([part_of(part, **keywords).o for part in x.split(chunk, 1)], 1), None)


def _nothing(x: Tensor, **keywords: Any) -> MoEOutput:
    """In place of an MLP whose result nobody reads."""
    return MoEOutput(torch.empty_like(x), None)


_AGAIN: ContextVar[bool] = ContextVar("_AGAIN", default=False)
"""Whether this code is a block that is computed again."""


def _whole(keep_attention: bool) -> Contexts:
    """The contexts of a whole block."""
    made, again = attention_kept() if keep_attention else (nullcontext(), nullcontext())
    return made, _Again(again)


class _Again(AbstractContextManager[None]):
    """Around a block that is computed again; may be entered often."""

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self.inner = inner
        self.tokens: list[Token] = []

    def __enter__(self) -> None:
        self.tokens.append(_AGAIN.set(True))
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        _AGAIN.reset(self.tokens.pop())
