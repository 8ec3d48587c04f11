"""Every option of a run, and which of them cannot be meant."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ring_la import ArgumentError
from ring_la.models import HybridConfig, HybridLM
from ring_la.models.rounds import refuse_growing
from ring_la.nn import LAYERS
from ring_la.training import axis_sizes, recompute

OF_TRANSFORMERS = ("transformers", "scratch", "spread_experts", "lora", "lora_targets")
"""Options of `Model` that a HybridLM has not."""


@dataclass
class Model:
    """A HybridLM; see ring_la.models.HybridConfig.

    Attributes:
        layers: names from ring_la.nn.LAYERS; `repeat` times, one after the other.
        vocab_size: default: the tokenizer's.
        options: further keywords of layers, by name.
        transformers: a causal model of Transformers instead: a folder or name with its configuration, and with weights
            unless `scratch`. Each rank reads its shards of them.
        spread_experts: the experts of its mixtures over the context ranks, tokens to experts by all-to-all.
        lora: rank of adapters of its linear layers, which alone are trained; None: all weights are.
        lora_targets: names of the layers adapted; none: all linear ones that PEFT takes.
    """

    dim: int = 128
    layers: list[str] = field(default_factory=lambda: ["gdn", "gdn", "gdn", "attention"])
    repeat: int = 1
    num_heads: int = 2
    mlp: str = "swiglu"
    mlp_dim: int | None = None
    tie_embeddings: bool = True
    vocab_size: int | None = None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    mlp_options: dict[str, Any] = field(default_factory=dict)
    transformers: str | None = None
    scratch: bool = False
    spread_experts: bool = False
    lora: int | None = None
    lora_targets: list[str] = field(default_factory=list)

    def config(self, vocab_size: int) -> HybridConfig:
        fields = {k: v for k, v in asdict(self).items() if k not in OF_TRANSFORMERS}
        fields["layers"] = self.layers * fields.pop("repeat")
        return HybridConfig(**fields | {"vocab_size": self.vocab_size or vocab_size})


@dataclass
class Data:
    """Documents and how they become sequences.

    Attributes:
        source: a text or parquet file, or a folder of them. text_column: of parquet and jsonl files.
        tokenizer: "bytes", a tokenizer.json, or what Transformers' AutoTokenizer takes.
        seq_len: tokens of a sequence, all ranks' together. sequences: of a step, all replicas' together.
        documents: "packed": none sees another; "joined": a sequence is one document; "balanced": packed by attention's
            work, none cut unless it is longer than a sequence, which may be shorter than seq_len.
        max_document: longer documents are cut into parts of this many tokens.
        cache: where tokens are kept (default: the run's folder). workers: processes that read ahead.
    """

    source: str = "docs"
    text_column: str = "text"
    tokenizer: str = "bytes"
    seq_len: int = 4096
    sequences: int = 1
    documents: Literal["packed", "joined", "balanced"] = "packed"
    max_document: int | None = None
    cache: str | None = None
    workers: int = 0
    seed: int = 0


@dataclass
class Parallel:
    """Ranks by axis; one may be −1, what is left. Parameters are sharded over fsdp × context, copied over data.

    Attributes:
        layout, scan, attention, head_groups, transport, validate: as in ContextParallel. scan="auto" measures the group
            at every start, so a run started again may pick another strategy, whose rounding differs.
        timeout: seconds after which a rank that does not answer is taken for lost; torchrun then starts all again.
    """

    data: int = 1
    fsdp: int = 1
    context: int = -1
    layout: Literal["zigzag", "contiguous", "balanced"] = "zigzag"
    scan: Literal["auto", "ring", "pipelined", "all_gather", "doubling", "all_to_all"] = "all_to_all"
    attention: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    head_groups: int | Literal["auto"] = 1
    transport: Literal["auto", "torch", "symmetric"] = "auto"
    validate: Literal["first", "always", "never"] = "first"
    timeout: float = 300.0


@dataclass
class Memory:
    """What is kept and in which precision.

    Attributes:
        dtype: of computing; sums of gradients are fp32. parameters: of the weights, and of the optimizer's states.
        recompute: kinds of layers, "mlp" or "block", see ring_la.training.recompute. mlp_chunk: tokens an MLP takes.
        keep_attention: results of softmax attention in what is recomputed are kept, which saves its time.
        loss_chunk: tokens whose logits exist at a time.
        rounds: runs of a sequence worked on one after the other (recurrent layers alone).
        offload: GiB of activations on their way to the host, where what the backward pass needs is kept; None: nowhere.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    parameters: Literal["float32", "bfloat16"] = "float32"
    recompute: list[str] = field(default_factory=lambda: ["mlp"])
    mlp_chunk: int | None = None
    keep_attention: bool = False
    loss_chunk: int = 8192
    rounds: int = 1
    offload: float | None = None


@dataclass
class Optimizer:
    """AdamW with linear warm-up and a cosine to `final` · lr; gradients clipped to norm `clip` over all axes.

    `kind`: adamw (PyTorch's), or with states of 8 or 4 bits, of torchao (the extra "low-memory"). The first steps of a
    wide model need a small rate: `lr / warmup` of about 5e-6 at 2,560 channels.
    """

    kind: Literal["adamw", "adamw8bit", "adamw4bit"] = "adamw"
    lr: float = 1e-3
    final: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1, … of so many: a function of the step alone, so there is nothing to resume."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class Run:
    """Attributes:
    folder: what the run leaves. steps: in all.
    step: compiled: both halves of every block are graphs of torch.compile, for all lengths (a HybridLM's).
    save_every: steps between checkpoints; 0: none. keep: how many. background: written while training goes on.
    resume: go on from the newest checkpoint in the folder.
    tensorboard: write its files. wandb: a Weights & Biases project that mirrors them.
    profile: steps to trace, from the third of this start on.
    rehearse: tokens of a sequence that is tried first, so that kernels are compiled before the first step.
    pretrained: after the last step, a folder that from_pretrained reads (a model of Transformers, or its adapters).
    seed: of the parameters. deadline: stop after so many seconds of steps, with a checkpoint; so does SIGTERM.
    """

    folder: str = "runs/hybrid"
    steps: int = 100
    step: Literal["eager", "compiled"] = "eager"
    save_every: int = 50
    keep: int = 2
    background: bool = True
    resume: bool = True
    tensorboard: bool = False
    wandb: str | None = None
    profile: int = 0
    rehearse: int | None = None
    pretrained: str | None = None
    seed: int = 0
    deadline: float | None = None


@dataclass
class Config:
    """A run."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Run = field(default_factory=Run)


LEAST = {
    **{"data.seq_len": 2, "data.sequences": 1, "data.workers": 0, "data.max_document": 2, "model.lora": 1},
    **{"memory.loss_chunk": 1, "memory.rounds": 1, "memory.mlp_chunk": 1, "memory.offload": 0, "optimizer.warmup": 0},
    **{"optimizer.final": 0, "optimizer.weight_decay": 0, "optimizer.beta1": 0, "optimizer.beta2": 0},
    **{"run.steps": 0, "run.save_every": 0, "run.keep": 1, "run.profile": 0, "run.rehearse": 2, "run.deadline": 0},
}
"""The least value of a number, where one is given."""
POSITIVE = ("optimizer.lr", "optimizer.clip", "optimizer.eps", "parallel.timeout")


def check(config: Config) -> None:
    """Refuse numbers with which a run would do nothing, or not what was meant."""
    for name in (*LEAST, *POSITIVE):
        part, _, option = name.partition(".")
        value = getattr(getattr(config, part), option)
        if name in LEAST and value is not None and value < LEAST[name]:
            raise ArgumentError(name, f"at least {LEAST[name]}", value)
        if name in POSITIVE and not value > 0:
            raise ArgumentError(name, "more than 0", value, ".inf clips nothing" if name == "optimizer.clip" else "")
    for name in ("beta1", "beta2"):
        if (value := getattr(config.optimizer, name)) >= 1:
            raise ArgumentError(f"optimizer.{name}", "less than 1", value)
    if (groups := config.parallel.head_groups) != "auto" and groups < 1:
        raise ArgumentError("parallel.head_groups", "auto or at least 1", groups)
    if (config.run.rehearse or 0) > config.data.seq_len:
        raise ArgumentError("run.rehearse", f"at most data.seq_len, {config.data.seq_len}", config.run.rehearse)
    for name in config.memory.recompute:
        if name not in ("mlp", "block", "norm", *LAYERS):
            raise ArgumentError("memory.recompute", f"mlp, block, norm or names out of {', '.join(LAYERS)}", repr(name))
    check_kind(config)


def check_kind(config: Config) -> None:
    """Refuse what the model that is trained, a HybridLM or one of Transformers, would not be told."""
    model, made, default = config.model, config.model.transformers, Model()
    for name in OF_TRANSFORMERS:
        value, none = getattr(model, name), getattr(default, name)
        if value != none and not made:
            raise ArgumentError(f"model.{name}", f"{none} without model.transformers", value)
    if model.lora_targets and model.lora is None:
        raise ArgumentError("model.lora_targets", "none without model.lora", model.lora_targets)
    if made and config.memory.rounds > 1:
        raise ArgumentError("memory.rounds", "1 with model.transformers", config.memory.rounds)
    if config.memory.rounds > 1 and config.parallel.layout != "zigzag":
        raise ArgumentError("parallel.layout", "zigzag with memory.rounds", config.parallel.layout)
    if config.run.step == "compiled" and made:
        raise ArgumentError("run.step", "eager with model.transformers", config.run.step)
    if config.run.step == "compiled" and config.memory.keep_attention:
        raise ArgumentError("memory.keep_attention", "false where run.step is compiled", True, "Graphs keep no results")
    if config.run.pretrained and not made:
        hint = "`ring-la export` writes a HybridLM"
        raise ArgumentError("run.pretrained", "none without model.transformers", config.run.pretrained, hint)


def check_on(config: Config, ranks: int) -> None:
    """Refuse what would end every rank of so many before its first step, as far as one process can tell."""
    data, parallel, model = config.data, config.parallel, config.model
    sizes = axis_sizes(ranks, data=parallel.data, fsdp=parallel.fsdp, context=parallel.context)
    replicas = sizes[0] * sizes[1]
    if data.sequences % replicas:
        raise ArgumentError("data.sequences", f"a multiple of data × fsdp = {replicas}", data.sequences)
    folder = Path(config.run.folder).absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ArgumentError("run.folder", "a folder, there or to be made", config.run.folder, f"{there} is in the way")
    if not Path(data.source).exists():
        raise ArgumentError("data.source", "a file or a folder", repr(data.source))
    if not model.transformers:
        with torch.device("meta"):
            hybrid = HybridLM(model.config(vocab_size=2))
        recompute(hybrid, config.memory.recompute, mlp_chunk=config.memory.mlp_chunk)
        if config.memory.rounds > 1:
            refuse_growing(zip(hybrid.config.layers, hybrid.blocks))
    if config.run.resume and (file := Path(config.run.folder, "config.json")).exists():
        refuse_other_model(config, json.loads(file.read_text()))


def refuse_other_model(config: Config, was: dict[str, Any]) -> None:
    """Refuse a folder whose run, as its config.json tells, is of another model."""
    for name, value in json.loads(json.dumps(asdict(config.model))).items():
        if name != "spread_experts" and was["model"].get(name, value) != value:
            expected = f"a folder of its own for a model with {name}={value}"
            raise ArgumentError("run.folder", expected, f"{config.run.folder} with {name}={was['model'].get(name)}")
