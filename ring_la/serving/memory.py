"""How many tokens fit a GPU: measured before the first request, by reading prompts of two lengths.

What grows with a sequence is its states. While a piece is read, or a token, those before it, those after it and a copy
the attention makes of keys and values exist at once; what a piece needs beside them does not grow. Keys that stay on
the rank that read them exist once, a rank's share of them. Where a prompt is read in one piece, everything grows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..context import ContextParallel
from ..inference import Prefilled
from .model import Served, keys_stay
from .prefixes import size_since

COPIES = 3
"""States of a sequence that exist at once while it grows."""
SHARE = 0.8
"""Of the memory that is free, what is given out: the rest is lost between blocks."""
KEPT = 0.1
"""Of the memory that is free, what states of earlier prompts may take where nobody says how much."""
FEW, MANY = 64, 8192
"""Tokens a rank reads to measure; `MANY` where there is no piece."""


class Taken(NamedTuple):
    """Bytes a prompt took: at most, and for what is remembered of it."""

    peak: int
    states: int


def fitting(model: Served, cp: ContextParallel, piece: int | None, keep: int) -> int | None:
    """The tokens of all sequences together that fit beside everything else; None: any number, or a CPU. Collective.

    Args:
        piece: the most tokens read at once; None: whole prompts. keep: bytes promised to something else.
    """
    if model.device.type != "cuda":
        return None
    few, many = FEW * cp.size, piece or MANY * cp.size
    _take(model, cp, few)  # compiles what is to be compiled
    a, b = _take(model, cp, few), _take(model, cp, max(many, few + 1))
    torch.cuda.empty_cache()
    room = SHARE * torch.cuda.mem_get_info(model.device)[0] - keep
    if model.goes_on:
        copies = 1 if keys_stay(model.shares_keys, cp) else COPIES  # what is in blocks is not copied
        each, room = copies * (b.states - a.states) / (many - few), room - b.peak
    else:
        each = (b.peak - a.peak) / (many - few)
    tokens = room / each if each > 0 else 2**62
    least = cp.comm.all_reduce(torch.tensor([int(max(0, tokens))], device=model.device), dist.ReduceOp.MIN).wait()
    return int(least) if least < 2**62 else None


def spare(model: Served, cp: ContextParallel) -> int:
    """Bytes each rank may keep of earlier prompts, `KEPT` of what its GPU or its part of the host has. Collective."""
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = _available() // int(os.environ.get("LOCAL_WORLD_SIZE", cp.size))
    least = cp.comm.all_reduce(torch.tensor([int(KEPT * free)], device=model.device), dist.ReduceOp.MIN).wait()
    return int(least)


def _available() -> int:
    """Bytes of the host's memory that programs can have."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def held(prompt: Prefilled) -> int:
    """Bytes of what a flexible model remembers of a prompt on this rank."""
    return size_since(prompt, 0)


def _take(model: Served, cp: ContextParallel, tokens: int) -> Taken:
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    ids = torch.arange(tokens, device=model.device)[None] % model.vocab_size
    prompt = model.read(ids, None, cp)
    torch.cuda.synchronize(model.device)
    return Taken(torch.cuda.max_memory_allocated(model.device) - before, held(prompt) if model.flexible else 0)
