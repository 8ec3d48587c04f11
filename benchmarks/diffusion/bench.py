"""One denoising step of a diffusion transformer, split over the ranks, beside Diffusers' own context parallelism.

    torchrun --nproc_per_node 4 -m ring_la bench diffusion --model flux --sizes 1024x1024 [--compile] [--out FILE.json]

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


def sizes_of(text: str) -> list[tuple[int, ...]]:
    """ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, comma-separated."""
    found = [word.split("x") for word in text.split(",")]
    if not all(2 <= len(words) <= 3 for words in found):
        raise argparse.ArgumentTypeError(f"expected ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, got {text!r}")
    return [tuple(count(word) for word in words) for words in found]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="flux")
    parser.add_argument("--sizes", type=sizes_of, default=None, help="ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, …")
    parser.add_argument("--layers", type=count, default=None, help="num_layers, by default as published")
    parser.add_argument("--arms", type=names(ARMS), default=None, help=f"out of {', '.join(ARMS)}")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--compile", action="store_true", help="compile the model's repeated blocks")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the figures as JSON")


class Where:
    """What arms have in common: the ranks, whether the model is tiny, its dtype, the options, outputs to compare."""

    def __init__(self, group: Group, options: argparse.Namespace) -> None:
        self.group, self.options, self.tiny = group, options, not group.on_cuda
        self.dtype = torch.bfloat16 if group.on_cuda else torch.float32
        self.shape = SHAPES[options.model]
        self.sizes = options.sizes or [self.shape.small if self.tiny else self.shape.size]
        self.wanted: dict[tuple[int, ...], Tensor] = {}


def run(options: argparse.Namespace) -> int:
    if not dist.is_initialized():
        _join()
    group = Group(None, timedelta(minutes=5))
    here = Where(group, options)
    title = f"{here.shape.model}, {group.size} ranks, {here.dtype}, torch {torch.__version__}"
    _say(group, title)
    rows = [row for arm in options.arms or ARMS for row in _measure(arm, here)]
    if options.out is not None and group.rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if group.on_cuda else "CPU"
        found = dict(title=title, device=device, compiled=options.compile, rows=rows)
        options.out.write_text(json.dumps(found, indent=1))
    return 0


def _measure(arm: str, here: Where) -> list[dict[str, Any]]:
    """A row of the table for each size, printed as it comes; an arm that cannot run says why."""
    rows: list[dict[str, Any]] = []
    model: nn.Module | None = None
    try:
        model = build(here.shape, here.options.layers, here.tiny, here.group.device, here.dtype)
        model = _prepared(arm, model, here)
        for size in here.sizes:
            rows.append({"arm": arm, "size": "x".join(map(str, size))} | _timed(arm, model, size, here))
            _say(
                here.group,
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()),
            )
    except Exception as error:  # a peer's reason is a row of the table
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        rows.append({"arm": arm, "cannot": why})
        _say(here.group, f"arm {arm}  cannot {why}")
    finally:
        del model
        gc.collect()
        if here.group.on_cuda:
            torch.cuda.empty_cache()
    return rows


def _timed(arm: str, model: nn.Module, size: tuple[int, ...], here: Where) -> dict[str, Any]:
    """Milliseconds, GiB, and the error beside the first arm's output of this size."""
    group, cuda = here.group, here.group.on_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step = _step(model, draw_inputs(here.shape, size, here.tiny, group.device, here.dtype))
    out = step().float()
    seconds = in_turns({arm: step}, group, rounds=here.options.rounds, warm=2)[arm]
    want = here.wanted.setdefault(size, out)
    row = {"ms": 1e3 * seconds, "error": float((out - want).norm() / want.norm())}
    return row | ({"GiB": torch.cuda.max_memory_allocated() / 2**30} if cuda else {})


def _say(group: Group, text: str) -> None:
    if group.rank == 0:
        print(text, flush=True)


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
