"""Train a hybrid language model on long sequences: data, FSDP2 and context axes together, and exact resume.

    torchrun --standalone --nproc_per_node 4 examples/train_hybrid.py --data.source docs --run.steps 100
    torchrun --standalone --nproc_per_node 8 examples/train_hybrid.py --config examples/configs/hybrid_1b.yaml

Every option is a field of a dataclass below, set on the command line or in a YAML file; `--help` lists them. The run's
folder gets its configuration, checkpoints, metrics.jsonl and TensorBoard's files; started again with the same folder,
it goes on from the newest complete checkpoint, also on another number of ranks. See docs/users/guides/training.md.

    python examples/train_hybrid.py ...               # without torchrun: one rank, which has whole sequences
    python examples/train_hybrid.py --check 4 ...     # what of the other arguments cannot work on 4 ranks; no training
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.models import HybridConfig, HybridLM
from ring_la.models.loss import IGNORE
from ring_la.training import (
    BalancedSequences,
    Checkpoints,
    Corpus,
    Offload,
    PackedSequences,
    StepFlops,
    TrainingMesh,
    adamw,
    axis_sizes,
    batches,
    clip_gradients,
    peak_flops,
    recompute,
    shard_parameters,
    sum_gradients,
)

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
        lora_targets: names of the layers adapted; none: all linear ones.
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
        max_document: longer documents are cut.
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
        layout, scan, attention, transport, validate: as in ContextParallel. scan="auto" measures the group at every
            start, so a run started again may pick another strategy, whose rounding differs.
        timeout: seconds after which a rank that does not answer is taken for lost; torchrun then starts all again.
    """

    data: int = 1
    fsdp: int = 1
    context: int = -1
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    scan: Literal["auto", "ring", "pipelined", "all_gather", "doubling", "all_to_all"] = "all_to_all"
    attention: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    transport: Literal["auto", "torch", "symmetric"] = "auto"
    validate: Literal["first", "always", "never"] = "first"
    timeout: float = 300.0


@dataclass
class Memory:
    """What is kept and in which precision.

    Attributes:
        dtype: of computing; sums of gradients are fp32. parameters: of the weights, and of the optimizer's states.
        recompute: kinds of layers, "mlp" or "block", see ring_la.training.recompute. mlp_chunk: tokens an MLP takes.
        loss_chunk: tokens whose logits exist at a time.
        rounds: runs of a sequence worked on one after the other (recurrent layers alone).
        offload: GiB of activations on their way to the host, where what the backward pass needs is kept; None: nowhere.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    parameters: Literal["float32", "bfloat16"] = "float32"
    recompute: list[str] = field(default_factory=lambda: ["mlp"])
    mlp_chunk: int | None = None
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
    **{"data.seq_len": 2, "data.sequences": 1, "data.workers": 0, "memory.loss_chunk": 1, "memory.rounds": 1},
    **{"optimizer.warmup": 0, "run.steps": 0, "run.save_every": 0, "run.keep": 1, "run.profile": 0},
}
"""The least value of what is counted."""
POSITIVE = ("optimizer.lr", "optimizer.clip", "optimizer.eps", "parallel.timeout")


def check(config: Config) -> None:
    """Refuse numbers with which a run would do nothing, or not what was meant."""
    for name in (*LEAST, *POSITIVE):
        part, _, option = name.partition(".")
        value = getattr(getattr(config, part), option)
        if name in LEAST and value < LEAST[name]:
            raise ArgumentError(name, f"at least {LEAST[name]}", value)
        if name in POSITIVE and not value > 0:
            raise ArgumentError(name, "more than 0", value, ".inf clips nothing" if name == "optimizer.clip" else "")


def check_on(config: Config, ranks: int) -> None:
    """Refuse what would end every rank of so many before its first step, as far as one process can tell."""
    data, parallel, model = config.data, config.parallel, config.model
    sizes = axis_sizes(ranks, data=parallel.data, fsdp=parallel.fsdp, context=parallel.context)
    replicas = sizes[0] * sizes[1]
    if data.sequences % replicas:
        raise ArgumentError("data.sequences", f"a multiple of data × fsdp = {replicas}", data.sequences)
    if not Path(data.source).exists():
        raise ArgumentError("data.source", "a file or a folder", repr(data.source))
    if not model.transformers:
        with torch.device("meta"):
            recompute(HybridLM(model.config(vocab_size=2)), config.memory.recompute, mlp_chunk=config.memory.mlp_chunk)
    if config.run.resume and (file := Path(config.run.folder, "config.json")).exists():
        refuse_other_model(config, json.loads(file.read_text()))


def refuse_other_model(config: Config, was: dict[str, Any]) -> None:
    """Refuse a folder whose run, as its config.json tells, is of another model."""
    for name, value in json.loads(json.dumps(asdict(config.model))).items():
        if name != "spread_experts" and was["model"].get(name, value) != value:
            expected = f"a folder of its own for a model with {name}={value}"
            raise ArgumentError("run.folder", expected, f"{config.run.folder} with {name}={was['model'].get(name)}")


def main(args: list[str] | None = None) -> None:
    from jsonargparse import auto_cli

    args = sys.argv[1:] if args is None else args
    ranks, args = (int(args[1]), args[2:]) if args[:1] == ["--check"] else (None, args)
    config = auto_cli(Config, args=args, as_positional=False)
    for option, module in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.run, option) and importlib.util.find_spec(module) is None:
            raise SystemExit(f"run.{option}: needs the package {module}, which is not installed")
    try:
        check(config)
        if ranks is not None:
            return check_on(config, ranks)
    except ArgumentError as e:
        raise SystemExit(str(e)) from None
    start = Start()
    start.part("imports")
    device = join(timedelta(seconds=config.parallel.timeout))
    start.part("process group")
    try:
        Trainer(config, device, start).train()
    except (ArgumentError, UnsupportedError) as e:  # a matter of the configuration, which is named
        raise SystemExit(f"rank {dist.get_rank()}: {e}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Start:
    """Where the seconds before the first step go, from `began` on (a time; default: when this process started)."""

    def __init__(self, began: float | None = None) -> None:
        self.began = self.at = time.time() - age() if began is None else began
        self.parts: dict[str, float] = {}

    def part(self, name: str) -> None:
        """What was done since the part before."""
        now = time.time()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.at
        self.at = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05)
        return f"ready after {self.at - self.began:.1f} s: {parts}"


def age() -> float:
    """Seconds since this process was started, on Linux; 0 elsewhere."""
    if not hasattr(time, "CLOCK_BOOTTIME") or not Path("/proc/self/stat").exists():
        return 0.0
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def join(timeout: timedelta) -> torch.device:
    """This rank's device: its GPU with NCCL, else the CPU with gloo and a share of the cores."""
    local, store = int(os.environ.get("LOCAL_RANK", 0)), fresh_store()
    ranks: dict[str, Any] = {"timeout": timeout}
    if store is not None:
        ranks |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    elif "RANK" not in os.environ:  # not started by torchrun
        ranks |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **ranks)
        return device
    dist.init_process_group("gloo", **ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return torch.device("cpu")


def fresh_store() -> dist.Store | None:
    """The store of torchrun on one node, without what an earlier start of the ranks left there; None elsewhere.

    torchrun keeps one store through all restarts (pytorch/pytorch#135712), and ranks would take the addresses of dead
    ones for their peers'. On several nodes restarts are not counted alike: launch/ sets
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there.
    """
    env = os.environ.get
    if env("TORCHELASTIC_USE_AGENT_STORE") != "True" or env("GROUP_WORLD_SIZE") != "1":
        return None
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]))
    return dist.PrefixStore(f"start-{env('TORCHELASTIC_RESTART_COUNT')}", dist.TCPStore(*where, is_master=False))


class Trainer:
    """Model, data, optimizer and checkpoints of one run on this rank."""

    def __init__(self, config: Config, device: torch.device, start: Start | None = None) -> None:
        check(config)
        self.config, self.device, self.start = config, device, start or Start()
        run, data, memory, parallel = config.run, config.data, config.memory, config.parallel
        self.mesh = mesh = TrainingMesh.make(
            device.type, data=parallel.data, fsdp=parallel.fsdp, context=parallel.context
        )
        if data.sequences % mesh.replicas:
            raise ArgumentError("data.sequences", f"a multiple of data × fsdp = {mesh.replicas}", data.sequences)
        self.cp = ContextParallel(
            mesh.context,
            scan=parallel.scan,
            attention=parallel.attention,
            transport=parallel.transport,
            validate=parallel.validate,
            timeout=parallel.timeout,
        )
        self.folder, self.first = Path(run.folder), dist.get_rank() == 0
        self.start.part("mesh")
        self.corpus = self._corpus()
        self.start.part("documents")
        torch.manual_seed(run.seed)  # the same parameters on every rank and for every split
        dtype = getattr(torch, memory.dtype)
        make = self._transformers if config.model.transformers else self._hybrid
        self.model = make(self.corpus.vocab_size, None if dtype == torch.float32 else dtype)
        self.start.part("model")
        self.peak = peak_flops(device)
        self.optimizer = self._optimizer()
        adapters = config.model.lora is not None
        self.everyone = ContextParallel(scan="ring", timeout=parallel.timeout) if adapters else None
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", keep=run.keep, background=run.background, frozen=not adapters
        )
        self.step, self.tokens = 0, 0

    def _corpus(self) -> Corpus:
        """Tokenised by rank 0; where hosts do not share a file system, by one rank of each."""
        data = self.config.data
        cache = data.cache or str(self.folder / "corpus")
        prepare = lambda: Corpus.prepare(data.source, cache, data.tokenizer, data.text_column)  # noqa: E731
        waiting, failed = dist.new_group(backend="gloo", timeout=timedelta(days=2)), [""]  # for as long as it takes
        if self.first:
            try:
                prepare()
            except ArgumentError as e:
                failed = [str(e)]
        dist.broadcast_object_list(failed, src=0, group=waiting)
        if failed[0]:
            raise SystemExit(failed[0])
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            prepare()
        dist.all_gather_object([None] * dist.get_world_size(), None, waiting)
        dist.destroy_process_group(waiting)
        return Corpus(prepare())

    def _hybrid(self, vocab_size: int, dtype: torch.dtype | None) -> torch.nn.Module:
        """A HybridLM, sharded."""
        shape, memory = self.config.model.config(vocab_size), self.config.memory
        if shape.vocab_size < vocab_size:
            raise ArgumentError("model.vocab_size", f"at least {vocab_size}, the tokenizer's", shape.vocab_size)
        self.flops = StepFlops(shape)
        with self.device:
            model = HybridLM(shape).to(getattr(torch, memory.parameters))
        recompute(model, memory.recompute, mlp_chunk=memory.mlp_chunk)
        return shard_parameters(model, self.mesh, dtype=dtype)

    def _transformers(self, vocab_size: int, dtype: torch.dtype | None) -> torch.nn.Module:
        """A model of Transformers, parallelized and sharded."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from ring_la.integrations.transformers import parallelize
        from ring_la.integrations.transformers.experts import split_experts
        from ring_la.integrations.transformers.tiles import tile_mlps
        from ring_la.integrations.transformers.weights import draw_weights, folder_of, load_weights

        options, memory, parallel = self.config.model, self.config.memory, self.config.parallel
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
        self.flops = StepFlops.of_weights(model, exclude=model.get_input_embeddings())
        parallelize(model, self.cp, kind=parallel.layout, loss_chunk=memory.loss_chunk).train()
        if memory.mlp_chunk:
            tile_mlps(model, memory.mlp_chunk)
        experts = split_experts(model, self.mesh.context) if options.spread_experts else []
        if memory.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        shard_parameters(model, self.mesh, blocks=layers, dtype=dtype, methods=(), experts=experts)
        if folder is None:
            draw_weights(model, seed=self.config.run.seed, device=self.device)
        else:
            load_weights(model, folder, device=self.device)
        model.train()
        return model if options.lora is None else self._adapted(model)

    def _adapted(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with adapters, of which every rank has a copy, and nothing else that is trained."""
        from peft import LoraConfig

        from ring_la.integrations.transformers.adapters import add_adapters

        options = self.config.model
        model.enable_input_require_grads()  # what is computed again in the backward pass needs an input with a gradient
        targets = options.lora_targets or "all-linear"
        config = LoraConfig(r=options.lora, target_modules=targets, task_type="CAUSAL_LM")
        return add_adapters(model, config, seed=self.config.run.seed)

    def _optimizer(self) -> torch.optim.Optimizer:
        o, parameters = self.config.optimizer, [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        return adamw(o.kind, groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)

    # -- the loop ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps that are left."""
        run, data, mesh = self.config.run, self.config.data, self.mesh
        self._resume()
        self.start.part("optimizer and checkpoint")
        if run.rehearse:
            self._rehearse(run.rehearse)
            self.start.part("rehearsal")
        size = data.sequences // mesh.replicas
        packed = self._sequences()
        keywords = dict(replica=mesh.replica, replicas=mesh.replicas, workers=data.workers)
        sequences = iter(batches(packed, steps=run.steps - self.step, size=size, **keywords))
        log = Log(self.config, self.folder, self.step, self._about()) if self.first else None
        self.start.part("loader and logs")
        if log:
            print(self.start, flush=True)
            sizes = dict(zip(("data", "fsdp", "context"), self.mesh.axes.shape))
            log.started(self.step, self.start, sizes)
        began, ending = time.time(), ""
        bar = tqdm(total=run.steps, initial=self.step, unit="step", disable=not self.first)
        with Terminated() as terminated, Profile(run.profile, self.folder) as profile:
            while self.step < run.steps and not ending:
                metrics = self.one_step(list(islice(sequences, size)))
                profile.step()
                ending = self._ending(began, terminated)
                if log:
                    log.write(self.step, metrics)
                    bar.set_postfix_str(Log.line(metrics), refresh=False)
                    bar.update()
                if run.save_every and (self.step % run.save_every == 0 or self.step == run.steps or ending):
                    self.checkpoints.save(self.step, self.model, self.optimizer, {"tokens": self.tokens})
            self.checkpoints.wait()
        bar.close()
        if run.pretrained and self.step >= run.steps:
            self._write(run.pretrained)
        if self.first and ending:
            kept = "started again, it goes on from there" if run.save_every else "run.save_every is 0: no checkpoint"
            print(f"stopped by {ending} after step {self.step} of {run.steps}; {kept}", flush=True)

    def _sequences(self) -> Any:
        """The sequences that are left, however often this run was started."""
        data, mesh = self.config.data, self.mesh
        if data.documents != "balanced":
            return PackedSequences(self.corpus, data.seq_len, data.seed, data.max_document, begin=self.tokens)
        keywords = dict(replicas=mesh.replicas, ranks=self.cp.size, kind=self.config.parallel.layout)
        work, begin = self.flops.work(), self.step * data.sequences
        return BalancedSequences(
            self.corpus, data.seq_len, data.sequences, work, seed=data.seed, begin=begin, **keywords
        )

    def one_step(self, sequences: list[tuple[Tensor, list[int]]]) -> dict[str, float]:
        """Forward, backward and update over this replica's sequences; what to log of it."""
        start, data, cuda = time.perf_counter(), self.config.data, self.device.type == "cuda"
        if data.documents == "joined":
            sequences = [(ids, [0, len(ids)]) for ids, _ in sequences]
        targets = torch.tensor(sum(len(ids) - len(cu) + 1 for ids, cu in sequences), device=self.device)
        if self.mesh.replicas > 1:
            dist.all_reduce(targets)
            targets //= self.cp.size
        targets.clamp_(min=1)
        seen = torch.tensor(sum(len(ids) for ids, _ in sequences))
        seen *= self.mesh.replicas
        if data.documents == "balanced" and self.mesh.replicas > 1:
            seen = torch.tensor(sum(len(ids) for ids, _ in sequences), device=self.device)
            dist.all_reduce(seen)
            seen //= self.cp.size
        loss = torch.zeros((), device=self.device)
        for ids, cu in sequences:
            with self._offload():
                part = self.loss(ids, cu, targets)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        if self.config.model.transformers:  # its loss is the whole sequence's on each rank that shares it
            loss /= self.cp.size
        if self.config.model.lora is not None:
            sum_gradients(self.model.parameters(), self.everyone)
        norm = clip_gradients(self.model.parameters(), self.config.optimizer.clip)
        rate = self.config.optimizer.rate(self.step, self.config.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, norm = loss.item(), norm.item()  # the one wait of the step
        if not math.isfinite(loss):
            raise SystemExit(f"step {self.step}: the loss is {loss}")
        seconds, tokens = time.perf_counter() - start, int(seen)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        speed = sum(self.flops(cu) for _, cu in sequences) * self.mesh.replicas / seconds / dist.get_world_size()
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "seconds": seconds, "tokens": self.tokens}
        metrics |= {"tokens_per_second": tokens / seconds, "tflops_per_rank": speed / 1e12}
        if self.peak:
            metrics["mfu"] = speed / self.peak
        if cuda:
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics

    def _offload(self) -> Any:
        limit = self.config.memory.offload
        return nullcontext() if limit is None else Offload(int(limit * 2**30))

    def loss(self, ids: Tensor, cu: list[int], total: Tensor) -> Tensor:
        """This rank's part of one sequence's loss."""
        memory, packed = self.config.memory, self.config.data.documents != "joined"
        offsets = cu if packed else None
        if memory.rounds > 1:
            keywords = dict(rounds=memory.rounds, cu_seqlens=offsets, total=total, chunk=memory.loss_chunk)
            return self.model.loss_in_rounds(ids[None].to(self.device), self.cp, **keywords)
        layout = self.cp.layout(len(ids), self.config.parallel.layout, offsets)
        following = ids.roll(-1)
        following[torch.tensor(cu[1:]) - 1] = IGNORE
        mine, labels = (layout.shard(x[None]).to(self.device, non_blocking=True) for x in (ids, following))
        if self.config.model.transformers:
            return self.model(mine, shift_labels=labels, layout=layout, num_items_in_batch=total, use_cache=False).loss
        return self.model.loss(mine, labels, layout=layout, total=total, chunk=memory.loss_chunk)

    def _write(self, folder: str) -> None:
        """The model as Transformers writes it, or its adapters as PEFT does."""
        from ring_la.integrations.transformers.weights import save_weights

        if self.config.model.lora is None:
            save_weights(self.model, folder)
        elif self.first:
            self.model.save_pretrained(folder)

    def _resume(self) -> None:
        run, progress, changed = self.config.run, None, ""
        if run.resume:
            changed = self._changed() if self.checkpoints.steps() else ""
            progress = self.checkpoints.load(self.model, self.optimizer)
        if progress:
            self.step, self.tokens = progress["step"], progress["tokens"]
        if self.first:
            state = f"going on from step {self.step} of {run.steps}{changed}" if progress else "starting"
            size = f"{self.flops.parameters / 1e6:,.1f} M parameters"
            print(f"{state}: {size}, {self.mesh}, sequences of {self.config.data.seq_len:,} tokens", flush=True)
            if self.step >= run.steps:
                print(f"nothing is left to do in {run.folder}: give more run.steps or another run.folder", flush=True)

    def _changed(self) -> str:
        """What of the data is not as it was when this folder's run last started; another model is refused."""
        file, now = self.folder / "config.json", json.loads(json.dumps(self._about()))
        was = json.loads(file.read_text()) if file.exists() else now
        refuse_other_model(self.config, was)
        for name in ("documents", "seq_len", "sequences", "seed"):
            balanced = "balanced" in (was["data"].get("documents"), now["data"]["documents"])
            if balanced and was["data"].get(name) != now["data"][name]:
                raise ArgumentError(f"data.{name}", f"{was['data'].get(name)!r}, as before", now["data"][name])
        other = [k for k, v in now["data"].items() if was["data"].get(k) != v]
        said = [f", data.{k} {now['data'][k]}" for k in other if k not in ("cache", "workers")]
        if not {"source", "text_column", "tokenizer"} & set(other) and was.get("corpus") != self.corpus.key:
            said.append(", files of data.source have changed")
        return "".join(said)

    def _about(self) -> dict[str, Any]:
        """What config.json keeps: the configuration, which text it was of, and a HybridLM's shape."""
        hybrid = None if self.config.model.transformers else self.config.model.config(self.corpus.vocab_size).to_dict()
        return asdict(self.config) | {"corpus": self.corpus.key, "hybrid": hybrid}

    def _rehearse(self, tokens: int) -> None:
        """Forward and backward over a short sequence, without an update."""
        ids = PackedSequences(self.corpus, tokens)[0][0]
        self.loss(ids, [0, tokens], torch.tensor(tokens, device=self.device)).backward()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _ending(self, began: float, terminated: Terminated) -> str:
        """What ends training after this step, on whichever rank it has come up; "" where nothing does."""
        late = time.time() - began > (self.config.run.deadline or math.inf)
        reasons = torch.tensor([float(terminated.asked), float(late)], device=self.device)
        dist.all_reduce(reasons)
        signalled, late = (reasons > 0).tolist()
        return "SIGTERM" if signalled else "run.deadline" if late else ""


class Terminated:
    """SIGTERM as a wish: schedulers and torchrun send it before they kill, so the step under way may end.

    torchrun kills 30 seconds later, or after its --shutdown-timeout. Where this is not the main thread, signals are not
    ours.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Terminated:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


# -- what a run leaves -------------------------------------------------------------------------------------


class Log:
    """metrics.jsonl, and TensorBoard's files or a Weights & Biases project if asked for. On rank 0."""

    def __init__(self, config: Config, folder: Path, step: int, about: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(about, indent=1))
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        file.write_text("".join(kept))  # without steps that will be done again
        self.file, self.board, self.wandb = open(file, "a"), None, None
        if config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if config.run.wandb:
            import wandb

            name = folder.resolve().name  # the run a restart goes on with
            self.wandb = wandb.init(
                project=config.run.wandb, id=name, dir=str(folder), config=asdict(config), resume="allow"
            )

    def started(self, step: int, start: Start, axes: dict[str, int]) -> None:
        """A line of starts.jsonl."""
        line = {"step": step, "began": start.began, "ready": start.at, "seconds": start.parts, "axes": axes}
        with open(self.folder / "starts.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step} | metrics) + "\n")
        self.file.flush()
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(metrics, step=step)

    @staticmethod
    def line(metrics: dict[str, float]) -> str:
        mfu = f", MFU {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        memory = f", {metrics['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in metrics else ""
        return f"loss {metrics['loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s{mfu}{memory}"


class Profile:
    """A Chrome trace of some steps from the third on: folder/profile/rank-<n>.json."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.inner: Any = nullcontext()
        if steps:
            file = folder / "profile" / f"rank-{dist.get_rank()}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            self.inner = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1),
                on_trace_ready=lambda p: p.export_chrome_trace(str(file)),
            )

    def __enter__(self) -> Profile:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def step(self) -> None:
        if hasattr(self.inner, "step"):
            self.inner.step()


if __name__ == "__main__":
    main()
