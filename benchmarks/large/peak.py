"""What has a GPU's memory at the peak of a step, by the line of code that asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import ROOT

Event = Mapping[str, Any]
OURS = (f"{ROOT}/", "/transformers/", "/torchao/", "/fsdp/", "/optim/")
"""In paths of the code that is named, the innermost first."""


class Peak:
    """Writes down what the last step allocates; what there was before it is one number.

        with Peak(trainer.optimizer, steps=3) as peak:
            trainer.train()
        peak.found                                      # {} where nothing was recorded

    Attributes:
        found: ``before`` and ``peak`` in GiB; ``lines``: ``[where, tensors, GiB]`` of this step at its peak.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.left, self.before, self.found = steps - 1, 0, {}
        self.hook = optimizer.register_step_post_hook(self._updated)

    def _updated(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and torch.cuda.is_available():
            self.before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=2_000_000)

    def __enter__(self) -> Peak:
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        if self.left <= 0 and torch.cuda.is_available():
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            torch.cuda.memory._record_memory_history(enabled=None)
            self.found = at_peak(events, self.before)


def at_peak(events: Sequence[Event], before: int = 0, most: int = 40) -> dict[str, Any]:
    """What is alive where the allocator's events, in order, reach the most bytes; `before`: bytes before them."""
    total, highest, place = before, before, -1
    for i, event in enumerate(events):
        total += _change(event)
        if total > highest:
            highest, place = total, i
    live: dict[int, Event] = {}
    for event in events[: place + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    tensors, sizes = Counter[str](), Counter[str]()
    for event in live.values():
        where = named(event.get("frames", ()))
        tensors[where] += 1
        sizes[where] += event["size"]
    lines = [[where, tensors[where], size / 2**30] for where, size in sizes.most_common(most)]
    return {"before": before / 2**30, "peak": highest / 2**30, "lines": lines}


def _change(event: Event) -> int:
    return {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)


def named(frames: Sequence[Mapping[str, Any]]) -> str:
    """The two innermost frames of ours, or of a library that allocates for us; operators' backward passes have none."""
    ours = [f for f in frames if any(part in f["filename"] for part in OURS)]
    return (
        " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in ours[:2]) or "an operator's backward"
    )
