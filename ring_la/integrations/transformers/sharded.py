"""Models of Transformers that no rank has whole: for reading long prompts and decoding on all ranks together.

    model = empty("folder", dtype)                  on the device "meta"
    weights = shard_weights(parallelize(model, cp), cp)
    load_weights(model, "folder", device=cp.device) each rank reads what its parts need
    weights.settle(model)

Linear layers, embeddings and stacked experts are sharded (`ring_la.inference.sharded_weights`). The experts' part of a
rank is that of the library's expert-parallel plans. Its tensor-parallel plans cut the sums of some products and leave
recurrences whole; here all products are cut by their outputs, as those plans do with the projections of gated delta
nets ("colwise_gather_output"): every model has such a split, and nobody's sums are others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ...context import ContextParallel
from ...errors import ArgumentError, UnsupportedError
from ...inference.sharded_weights import ShardedWeights
from .experts import chosen_experts, is_experts
from .mixers import scans
from .model import parallelize
from .weights import load_weights

CUT = 1024
"""Tokens that all ranks have alike, up to which products are cut: to gather all weights would take longer."""


STRIP = 16384
"""Tokens of a rank that go through a layer's experts at once: k rows of each exist several times."""


def load_sharded(folder: str | Path, cp: ContextParallel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal model of a folder, parallelized, each rank with its part of the weights. Collective.

    Args:
        folder: configuration and safetensors. dtype: of the weights; None: what the configuration says.

    Raises:
        ArgumentError: no such model there. UnsupportedError: one that is quantised, or cannot run split.
    """
    model = empty(folder, dtype)
    weights = shard_weights(model, cp)
    try:
        load_weights(model, folder, device=cp.device)
    except ArgumentError as e:
        raise ArgumentError("model", "safetensors with the weights of its configuration", str(e)) from None
    if weights is not None:
        weights.settle(model)
    return model.eval()


def empty(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal model of a folder, or of what is there of it, on the device "meta"."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError("sharded", "False for a quantised model", str(folder))
    stored = config.dtype or config.get_text_config().dtype or torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype or stored)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def shard_weights(model: PreTrainedModel, cp: ContextParallel) -> ShardedWeights | None:
    """Parallelize a model and make its large weights shards, on "meta" or in memory; None: there is one rank.

    Calls of up to `CUT` tokens that all ranks have alike are cut, and collective as split ones are.
    """
    if cp.size == 1:
        return None
    parallelize(model, cp)
    current: Any = model._ring_la.current  # type: ignore[union-attr]
    tokens = 0

    def count(_: nn.Module, args: tuple, keywords: dict) -> None:
        nonlocal tokens
        ids = keywords.get("input_ids", args[0] if args else None)
        tokens = ids.numel() if isinstance(ids, Tensor) else CUT + 1

    model.register_forward_pre_hook(count, with_kwargs=True)
    weights = ShardedWeights(cp, lambda: current.call is None and tokens <= CUT)
    read_by_others = [m.kv_b_proj for m in model.modules() if hasattr(m, "expand_kv")]
    read_by_others += [m.dt_proj for m in model.modules() if scans(m) and hasattr(m, "dt_proj")]
    weights.take_linears(model, read_by_others)  # type: ignore[arg-type]
    for module in model.modules():
        if is_experts(module) and len({p.shape[0] for p in module.parameters(recurse=False)}) == 1:
            names = [name for name, _ in module.named_parameters(recurse=False)]
            changed: Any = module
            changed.forward = partial(_in_strips, module.forward)
            weights.take(module, names, partial(_cut_experts, weights, module))
    model._ring_la_weights = weights  # type: ignore[assignment]
    return weights


def _in_strips(own: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """A mixture's experts on ``(tokens [N, D], chosen [N, k], weights [N, k])``, some tokens at a time."""
    return torch.cat([own(*strip) for strip in zip(*(x.split(STRIP) for x in given))])


def _cut_experts(
    weights: ShardedWeights, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of this rank on tokens that all ranks have; of each choice one rank's result, summed as one process
    sums them."""
    rows, chosen = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
    part = weights.part(module, "down_proj")
    out = chosen_experts(module, rows, chosen, top_k_weights, part.rows, part.first, part.here)
    with weights.comm.streams.in_order():
        out = weights.comm.all_reduce(out).wait()
    return out.view(*chosen.shape, -1).sum(1).to(rows.dtype).view(hidden_states.shape)
