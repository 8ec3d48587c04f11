"""What a run leaves beside its checkpoints: metrics, and a profile."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .options import Config
from .start import Start


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
