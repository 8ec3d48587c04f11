"""What benchmarks' options have in common beside `ring_la.cli.options`: lists for argparse, and the figures of an
earlier run. What is none ends with the option's name, what was expected and what came."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ring_la.cli.options import count
from ring_la.errors import ArgumentError


def need_gpus(parser: argparse.ArgumentParser) -> None:
    """End with a line where there is no CUDA device."""
    if not torch.cuda.is_available():
        parser.error("device: expected a CUDA device, got none")


def join_gpus(parser: argparse.ArgumentParser) -> None:
    """Join torchrun's ranks over NCCL, a GPU each; end with a line where there are none."""
    need_gpus(parser)
    if "LOCAL_RANK" not in os.environ:
        parser.error("ranks: expected some that torchrun started, got a process alone")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)


def counts(text: str) -> list[int]:
    """Numbers ≥ 1, comma-separated."""
    return [count(word) for word in text.split(",")]


def names(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Names out of `choices`, comma-separated."""

    def chosen(text: str) -> list[str]:
        for word in text.split(","):
            if word not in choices:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(choices)}, got {word!r}")
        return text.split(",")

    return chosen


def earlier(file: Path) -> dict[str, Any]:
    """What a benchmark's --out wrote, for --read: a dictionary with "rows"."""
    try:
        found = json.loads(file.read_text())
        found["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError("read", "what an earlier --out wrote", f"{file} ({error!r})") from error
    return found
