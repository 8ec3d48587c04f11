"""The training example as a module."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_hybrid.py"
CONFIGS = sorted(ROOT.glob("examples/configs/*.yaml"))

STEPS = 8
OPTIONS = {
    "model.dim": 16,
    "model.layers": "[gdn,attention]",
    "data.source": str(ROOT / "docs"),
    "data.seq_len": 97,
    "data.max_document": 40,
    "data.sequences": 4,
    "optimizer.warmup": 2,
    "optimizer.lr": 0.01,
    "memory.recompute": "[gdn]",
    "run.steps": STEPS,
    "run.save_every": 2,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    options = OPTIONS | {"run.folder": folder} | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"--{name}={value}" for name, value in options.items()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, whole lines alone."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in found}


def example():
    """The script as a module."""
    if "train_hybrid" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_hybrid", SCRIPT)
        sys.modules["train_hybrid"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_hybrid"])
    return sys.modules["train_hybrid"]


def train(rank: int, options: list[str]) -> None:
    """In the pool: a run of the script on its ranks."""
    from jsonargparse import auto_cli

    script = example()
    script.Trainer(auto_cli(script.Config, args=options, as_positional=False), torch.device("cpu")).train()


def parsed(arguments: list[str]):
    """The example's configuration of a command line, read in the repository."""
    jsonargparse = pytest.importorskip("jsonargparse")
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        return jsonargparse.auto_cli(example().Config, args=arguments, as_positional=False)
    finally:
        os.chdir(here)
