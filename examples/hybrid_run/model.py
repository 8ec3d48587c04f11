"""The model a run trains: a HybridLM or one of Transformers, sharded over the ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.models import HybridLM
from ring_la.training import (
    StepFlops,
    TrainingMesh,
    attention_kept,
    draw_hybrid,
    recompute,
    shard_parameters,
)

from .options import Config


class Place(NamedTuple):
    """Where a model is made.

    Attributes:
        mesh, cp: the ranks by axis, and those a sequence is split over. device: this rank's.
        dtype: that weights are gathered in to compute; None: their own.
    """

    mesh: TrainingMesh
    cp: ContextParallel
    device: torch.device
    dtype: torch.dtype | None


def make_model(config: Config, place: Place, vocab_size: int) -> tuple[torch.nn.Module, StepFlops]:
    """The model that the options describe, sharded, for a tokenizer of so many ids; and the FLOPs of its steps."""
    make = _transformers if config.model.transformers else _hybrid
    return make(config, place, vocab_size)


def _hybrid(config: Config, place: Place, vocab_size: int) -> tuple[torch.nn.Module, StepFlops]:
    """A HybridLM, sharded."""
    shape, memory = config.model.config(vocab_size), config.memory
    if shape.vocab_size < vocab_size:
        raise ArgumentError("model.vocab_size", f"at least {vocab_size}, the tokenizer's", shape.vocab_size)
    flops = StepFlops(shape)
    with torch.device("meta"):  # no rank has all of it at any time
        model = HybridLM(shape).to(getattr(torch, memory.parameters))
    if config.run.step == "compiled":
        _compile(model)
    recompute(model, memory.recompute, mlp_chunk=memory.mlp_chunk, keep_attention=memory.keep_attention)
    shard_parameters(model, place.mesh, dtype=place.dtype)
    return draw_hybrid(model, place.device), flops


def _compile(model: HybridLM) -> None:
    """Both halves of every block as graphs without a break. What is recomputed, cut into chunks or gathered by FSDP2
    stands around them."""
    for block in model.blocks:
        for half in ("mix_tokens", "mix_channels"):
            setattr(block, half, torch.compile(getattr(block, half), fullgraph=True, dynamic=True))


def _transformers(config: Config, place: Place, vocab_size: int) -> tuple[torch.nn.Module, StepFlops]:
    """A model of Transformers, parallelized and sharded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts
    from ring_la.integrations.transformers.tiles import tile_mlps
    from ring_la.integrations.transformers.weights import draw_weights, folder_of, load_weights

    options, memory, parallel = config.model, config.memory, config.parallel
    name = options.transformers
    if memory.rounds > 1:
        raise UnsupportedError("memory.rounds", "1 with model.transformers", memory.rounds)
    try:
        with torch.device("meta"):
            own = getattr(torch, memory.parameters)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=own)
        folder = None if options.scratch else folder_of(name)
    except (OSError, ValueError) as e:
        expected = "a folder or name of a causal language model, with weights unless model.scratch"
        raise ArgumentError("model.transformers", expected, repr(name), str(e)) from None
    if model.config.get_text_config().vocab_size < vocab_size:
        most = model.config.get_text_config().vocab_size
        raise ArgumentError("data.tokenizer", f"at most the model's {most} ids", vocab_size)
    flops = StepFlops.of_weights(model, exclude=model.get_input_embeddings())
    kind = "zigzag" if parallel.layout == "balanced" else parallel.layout  # each call is given its own layout
    parallelize(model, place.cp, kind=kind, loss_chunk=memory.loss_chunk).train()
    if memory.mlp_chunk:
        tile_mlps(model, memory.mlp_chunk)
    experts = split_experts(model, place.mesh.context) if options.spread_experts else []
    if memory.recompute:
        contexts = {"context_fn": attention_kept} if memory.keep_attention else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    shard_parameters(model, place.mesh, blocks=layers, dtype=place.dtype, methods=(), experts=experts)
    if folder is None:
        draw_weights(model, seed=config.run.seed, device=place.device)
    else:
        load_weights(model, folder, device=place.device)
    model.train()
    return (model if options.lora is None else _adapted(config, model)), flops


def _adapted(config: Config, model: torch.nn.Module) -> torch.nn.Module:
    """The model with adapters, of which every rank has a copy, and nothing else that is trained."""
    from peft import LoraConfig

    from ring_la.integrations.transformers.adapters import add_adapters, all_linear

    options = config.model
    model.enable_input_require_grads()  # what is computed again in the backward pass needs an input with a gradient
    targets = {"target_modules": options.lora_targets} if options.lora_targets else all_linear(model)
    adapters = LoraConfig(r=options.lora, task_type="CAUSAL_LM", **targets)
    return add_adapters(model, adapters, seed=config.run.seed)
