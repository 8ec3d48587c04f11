"""What a step's time is made of, from the profiler: kernels by kind, and how long a GPU had none.

Kinds overlap where streams do, so their sum may be more than `span`; `busy` counts no moment twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ring_la.comm import EXCHANGES, Group

from ..timing import barrier

KINDS = {
    "attention": r"sdpa|flash_fwd|flash_attn|fmha|flashattn",
    "messages": EXCHANGES,
    "merging": r"^_merge|^_add$",
    "copies": r"^memcpy|^memset",
    "matrices": r"gemm|gemv|nvjet|cutlass|cublas|splitk",
}
"""Names of kernels by kind, the first that fits; what fits none is "others": norms, activations, rotary embeddings."""
SHOWN = 24


class Launch(NamedTuple):
    """A kernel or a copy: its name, and when it ran, in ns."""

    name: str
    start: int
    stop: int


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), "others")


def summed(launches: Iterable[Launch]) -> dict[str, Any]:
    """Milliseconds by kind, `busy` and `span`; under "kernels" the dearest: name, how many, milliseconds."""
    found, kinds, each = sorted(launches, key=lambda x: x.start), defaultdict(float), defaultdict(list)  # type: ignore[var-annotated]
    busy, end = 0, 0
    for x in found:
        kinds[kind_of(x.name)] += (x.stop - x.start) / 1e6
        each[x.name].append((x.stop - x.start) / 1e6)
        busy, end = busy + max(0, x.stop - max(x.start, end)), max(end, x.stop)
    first = found[0].start if found else 0
    dearest = sorted(each.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    shown = [[name[:100], len(took), round(sum(took), 4)] for name, took in dearest]
    return {"parts": {**kinds, "busy": busy / 1e6, "span": (end - first) / 1e6}, "kernels": shown}


def profiled(step: Callable[[], object], group: Group) -> dict[str, Any]:
    """What `summed` says of one step on this rank. Every rank calls."""
    from torch.profiler import ProfilerActivity, profile

    barrier(group)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(group.device)
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]  # type: ignore[union-attr]
    return summed(Launch(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
