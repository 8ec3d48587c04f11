"""The training example as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_hybrid.py"


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
