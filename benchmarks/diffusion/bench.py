"""One denoising step of a diffusion transformer, split over the ranks, beside Diffusers' own context parallelism.

    torchrun --nproc_per_node 4 -m ring_la bench diffusion --model flux --size 1024x1024 [--compile] [--out FILE.json]

Models have published shapes and random weights (the same on all ranks); a size is the image's, ROWSxCOLUMNS, or a
video's, LATENT_FRAMESxROWSxCOLUMNS. Arms: "one" (the whole step on every rank: one GPU's time), "ours", "ours_ring",
"ours_ulysses" (`parallelize`), and Diffusers' ring and Ulysses where it can run the model. Errors are relative to
"one", by the norm. Arms run one after the other, each in a model of its own; times are medians of the slowest rank's.
Without GPUs a tiny model runs over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ring_la
from ring_la.cli.options import count
from ring_la.comm import Group
from ring_la.errors import ArgumentError
from ring_la.integrations.diffusers import parallelize

from ..options import names
from ..peers.diffusion import PEERS, diffusers_parallel
from ..timing import in_turns
from .shapes import SHAPES, build, draw_inputs

OURS = {"ours": "auto", "ours_ring": "ring", "ours_ulysses": "ulysses", "ours_all_gather": "all_gather"}
ARMS = ("one", *OURS, *PEERS)
CUDNN = "_native_cudnn"


def size_of(text: str) -> tuple[int, ...]:
    """ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS."""
    words = text.split("x")
    if not 2 <= len(words) <= 3:
        raise argparse.ArgumentTypeError(f"expected ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, got {text!r}")
    return tuple(count(word) for word in words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="flux")
    parser.add_argument("--size", type=size_of, default=None, help="ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS")
    parser.add_argument("--layers", type=count, default=None, help="num_layers, by default as published")
    parser.add_argument("--arms", type=names(ARMS), default=None, help=f"out of {', '.join(ARMS)}")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--compile", action="store_true", help="compile the model's repeated blocks")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the figures as JSON")


def run(options: argparse.Namespace) -> int:
    if not dist.is_initialized():
        _join()
    shape, cuda = SHAPES[options.model], torch.cuda.is_available()
    group = Group(None, timedelta(minutes=5))
    size = options.size or (shape.size if cuda else shape.small)
    here = Where(group, not cuda, torch.bfloat16 if cuda else torch.float32, options)
    inputs = draw_inputs(shape, size, here.tiny, group.device, here.dtype)
    title = f"{shape.model}, {'x'.join(map(str, size))}, {group.size} ranks, torch {torch.__version__}"
    rows, want = [], None
    if group.rank == 0:
        print(title, flush=True)
    for arm in options.arms or ARMS:
        row, out = _measure(arm, here, inputs)
        if out is not None:
            want = out if want is None else want
            row["error"] = float((out.float() - want.float()).norm() / want.float().norm())
        rows.append(row)
        if group.rank == 0:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if options.out is not None and group.rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if cuda else "CPU"
        options.out.write_text(
            json.dumps(dict(title=title, device=device, compiled=options.compile, rows=rows), indent=1)
        )
    return 0


class Where:
    """What arms have in common: the ranks, whether the model is tiny, its dtype, the options."""

    def __init__(self, group: Group, tiny: bool, dtype: torch.dtype, options: argparse.Namespace) -> None:
        self.group, self.tiny, self.dtype, self.options = group, tiny, dtype, options


def _measure(arm: str, here: Where, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """A row of the table, and the output; an arm that cannot run says why."""
    group, cuda = here.group, here.group.on_cuda
    row: dict[str, Any] = {"arm": arm}
    model: nn.Module | None = None
    try:
        model = build(SHAPES[here.options.model], here.options.layers, here.tiny, group.device, here.dtype)
        model = _prepared(arm, model, here)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step = _step(model, inputs)
        out = step()
        seconds = in_turns({arm: step}, group, rounds=here.options.rounds, warm=2)[arm]
        row["ms"] = 1e3 * seconds
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        return row, out.clone()
    except Exception as error:
        row["cannot"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return row, None
    finally:
        del model
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def _step(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    return step


def _prepared(arm: str, model: nn.Module, here: Where) -> nn.Module:
    if arm in OURS:
        model = parallelize(model, ring_la.ContextParallel(attention=OURS[arm]))
    elif arm in PEERS:
        model = diffusers_parallel(model, arm, here.group.size, CUDNN if here.group.on_cuda else None)
    elif here.group.on_cuda and hasattr(model, "set_attention_backend") and here.options.model in ("flux", "wan"):
        model.set_attention_backend(CUDNN)
    if here.options.compile:
        model.compile_repeated_blocks(dynamic=False)
    return model


def _join() -> None:
    """The job's process group; alone where torchrun has not started this."""
    if "RANK" not in os.environ:
        raise ArgumentError("ranks", "a run under torchrun", "none", "torchrun --nproc_per_node N -m ring_la bench …")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
