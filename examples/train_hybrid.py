"""Train a hybrid language model on long sequences: data, FSDP2 and context axes together, and exact resume.

    torchrun --standalone --nproc_per_node 4 examples/train_hybrid.py --data.source docs --run.steps 100
    torchrun --standalone --nproc_per_node 8 examples/train_hybrid.py --config examples/configs/hybrid_1b.yaml

Every option is a field of a dataclass in hybrid_run/options.py, set on the command line or in a YAML file; `--help`
lists them. The run's folder gets its configuration, checkpoints, metrics.jsonl and TensorBoard's files; started again
with the same folder, it goes on from the newest complete checkpoint, also on another number of ranks. See
docs/users/guides/training.md.

    python examples/train_hybrid.py ...               # without torchrun: one rank, which has whole sequences
    python examples/train_hybrid.py --check 4 ...     # what of the other arguments cannot work on 4 ranks; no training
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.models.loss import IGNORE
from ring_la.training import (
    BalancedSequences,
    Checkpoints,
    Corpus,
    Offload,
    PackedSequences,
    TrainingMesh,
    adamw,
    batches,
    clip_gradients,
    peak_flops,
    sum_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))  # where this file is imported, too
from hybrid_run.model import Place, make_model
from hybrid_run.options import Config, check, check_on, refuse_other_model
from hybrid_run.records import Log, Profile
from hybrid_run.start import Start, Terminated, join


def main(args: list[str] | None = None) -> None:
    from jsonargparse import auto_cli

    args = sys.argv[1:] if args is None else args
    ranks, args = (count(args[1:2]), args[2:]) if args[:1] == ["--check"] else (None, args)
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


def count(words: list[str]) -> int:
    """The number of ranks that --check is of."""
    if not words or not words[0].isdecimal() or int(words[0]) < 1:
        raise SystemExit(f"--check: expected a number of ranks, at least 1, got {' '.join(words) or 'nothing'}")
    return int(words[0])


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
            head_groups=parallel.head_groups,
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
        place = Place(mesh, self.cp, device, None if dtype == torch.float32 else dtype)
        self.model, self.flops = make_model(config, place, self.corpus.vocab_size)
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
            except OSError as e:
                failed = [f"{'data.cache' if data.cache else 'run.folder'}: {e}"]
        dist.broadcast_object_list(failed, src=0, group=waiting)
        if failed[0]:
            raise SystemExit(failed[0])
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            prepare()
        dist.all_gather_object([None] * dist.get_world_size(), None, waiting)
        dist.destroy_process_group(waiting)
        return Corpus(prepare())

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
            ahead, failed = read(sequences, size)
            ending = self._ending(began, terminated, failed)
            while self.step < run.steps and not ending:
                metrics = self.one_step(ahead)
                profile.step()
                ahead, failed = read(sequences, size)
                ending = self._ending(began, terminated, failed)
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
        if ending:
            kept = "started again, it goes on from there" if run.save_every else "run.save_every is 0: no checkpoint"
            said = f"stopped by {ending} after step {self.step} of {run.steps}; {kept}"
            if ending not in WISHED:
                raise SystemExit(said)
            if self.first:
                print(said, flush=True)

    def _sequences(self) -> Any:
        """The sequences that are left, however often this run was started."""
        data, mesh = self.config.data, self.mesh
        if data.documents != "balanced":
            return PackedSequences(self.corpus, data.seq_len, data.seed, data.max_document, begin=self.tokens)
        keywords: dict[str, Any] = dict(replicas=mesh.replicas, ranks=self.cp.size, kind=self.config.parallel.layout)
        keywords |= dict(seed=data.seed, max_document=data.max_document, begin=self.step * data.sequences)
        return BalancedSequences(self.corpus, data.seq_len, data.sequences, self.flops.work(), **keywords)

    def one_step(self, sequences: list[tuple[Tensor, list[int]]]) -> dict[str, float]:
        """Forward, backward and update over this replica's sequences; what to log of it."""
        start = time.perf_counter()
        if self.config.data.documents == "joined":
            sequences = [(ids, [0, len(ids)]) for ids, _ in sequences]
        targets, seen = self._counted(sequences)
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
        if not math.isfinite(loss + norm):  # the weights are lost: no checkpoint is made of them
            raise SystemExit(f"step {self.step}: the loss is {loss}, the norm of its gradient {norm}")
        seconds, tokens = time.perf_counter() - start, int(seen)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "seconds": seconds, "tokens": self.tokens}
        return metrics | self._speed(sequences, tokens, seconds)

    def _counted(self, sequences: list[tuple[Tensor, list[int]]]) -> tuple[Tensor, Tensor]:
        """Tokens with a target of all replicas' sequences, at least one, and all of their tokens."""
        balanced = self.config.data.documents == "balanced"
        targets = torch.tensor(sum(len(ids) - len(cu) + 1 for ids, cu in sequences), device=self.device)
        if self.mesh.replicas > 1:
            dist.all_reduce(targets)
            targets //= self.cp.size
        targets.clamp_(min=1)
        seen = torch.tensor(sum(len(ids) for ids, _ in sequences))
        seen *= self.mesh.replicas
        if balanced and self.mesh.replicas > 1:
            seen = torch.tensor(sum(len(ids) for ids, _ in sequences), device=self.device)
            dist.all_reduce(seen)
            seen //= self.cp.size
        return targets, seen

    def _speed(self, sequences: list[tuple[Tensor, list[int]]], tokens: int, seconds: float) -> dict[str, float]:
        """What to log of how fast a step was, and of memory."""
        speed = sum(self.flops(cu) for _, cu in sequences) * self.mesh.replicas / seconds / dist.get_world_size()
        metrics = {"tokens_per_second": tokens / seconds, "tflops_per_rank": speed / 1e12}
        if self.peak:
            metrics["mfu"] = speed / self.peak
        if self.device.type == "cuda":
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
        for name in ("documents", "seq_len", "sequences", "seed", "max_document"):
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

    def _ending(self, began: float, terminated: Terminated, failed: str) -> str:
        """What ends training after this step, on whichever rank it has come up; "" where nothing does."""
        late = time.time() - began > (self.config.run.deadline or math.inf)
        reasons = torch.tensor([float(terminated.asked), float(late), float(bool(failed))], device=self.device)
        dist.all_reduce(reasons)
        *wished, broken = (reasons > 0).tolist()
        if broken:
            said = [""] * dist.get_world_size()
            dist.all_gather_object(said, failed)
            return ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(said) if what)
        return next((name for name, yes in zip(WISHED, wished) if yes), "")


WISHED = ("SIGTERM", "run.deadline")
"""What ends a run as it was asked to."""


def read(sequences: Iterator[Any], size: int) -> tuple[list[Any], str]:
    """The next sequences, fewer at the end; and what went wrong on this rank, which the others then hear of."""
    try:
        return list(islice(sequences, size)), ""
    except Exception as error:  # of any kind
        return [], f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
