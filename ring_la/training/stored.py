"""What training left on disk, read on one process whatever split wrote it.

a file, or a folder with checkpoint.pt      "config" of a HybridConfig and "model", its weights (examples/train_demo.py)
a folder with checkpoints/step-*            a run of examples/train_hybrid.py: its newest complete checkpoint, or one
a folder with model.safetensors             what `ring_la.training.exports` wrote of a HybridLM
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import reading
from ..errors import ArgumentError, UnsupportedError, require
from ..models import HybridConfig, HybridLM

SINGLE = "model.safetensors"


def about(path: Path) -> dict[str, Any]:
    """The config.json of a folder, empty if there is none.

    Raises:
        ArgumentError: nothing is there, or no JSON.
    """
    file = path / "config.json"
    if not path.exists():
        raise ArgumentError("model", "a checkpoint or a folder with one", f"{path}, which is not there")
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as e:
        raise ArgumentError("model", "JSON in config.json", f"{file} ({e})") from None
    return found if isinstance(found, dict) else {}


def hybrid(path: Path, step: int | None = None) -> tuple[HybridConfig, dict[str, Tensor]]:
    """A HybridLM's configuration and weights.

    Args:
        path: see the module's text. step: of a run, which checkpoint; None: the newest.

    Raises:
        ArgumentError: none is there. UnsupportedError: a run of another model.
    """
    known = about(path)
    if path.is_dir() and not (path / "checkpoint.pt").is_file() and "hybrid" in known:
        if known["hybrid"] is None:
            hint = "Export it first: ring-la export RUN FOLDER"
            raise UnsupportedError("model", "a run of a HybridLM", f"{path}, of a model of Transformers", hint)
        config = HybridConfig(**known["hybrid"])
        if (path / SINGLE).is_file():
            return config, _single(path / SINGLE)
        weights = HybridLM(config).state_dict()
        restore(path, weights, step)
        return config, weights
    if step is not None:
        raise ArgumentError("step", "None for what is no run", step)
    return _of_file(path / "checkpoint.pt" if path.is_dir() else path)


def restore(path: Path, weights: dict[str, Tensor], step: int | None = None) -> None:
    """Fill `weights` from a run's checkpoint, on this process alone.

    Raises:
        ArgumentError: no complete checkpoint (of `step`), or one of other weights.
    """
    steps = {int(f.parent.name[5:]): f.parent for f in (path / "checkpoints").glob(f"step-*/{reading.METADATA}")}
    if not steps:
        raise ArgumentError("model", "a run with a complete checkpoint", str(path))
    if step is not None and step not in steps:
        raise ArgumentError("step", f"one of {sorted(steps)}", step)
    chosen = steps[max(steps) if step is None else step]
    try:
        reading.load({"model": weights}, chosen, no_dist=True)
    except (RuntimeError, ArgumentError) as e:
        raise ArgumentError("model", "weights that fit the configuration beside them", f"{chosen} ({e})") from None


def _of_file(file: Path) -> tuple[HybridConfig, dict[str, Tensor]]:
    expected = 'a file of torch.save with "config" and "model"'
    if not file.is_file():
        raise ArgumentError(
            "model", f"{expected}, a run of train_hybrid.py or a model of Transformers", str(file.parent)
        )
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return HybridConfig(**found["config"]), found["model"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as e:
        raise ArgumentError("model", expected, f"{file} ({type(e).__name__}: {e})") from None


def _single(file: Path) -> dict[str, Tensor]:
    require("safetensors", "model", "one file of weights")
    from safetensors.torch import load_file

    return load_file(file)
