"""What calls do not take by default, since it has not run on a GPU, beside what they take: `python -m
benchmarks.tuning.untried [--only mamba2] [--limit SECONDS]`.

A line of JSON an arm: whether its errors against fp64 stay within those of today's (times 1.3), and ms of forward and
backward as CUDA graphs. That each is right by itself is for tests/gpu.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ring_la.kernels.fused import discretise
from ring_la.kernels.scalar_decay import shared_gradients
from ring_la.kernels.spans import table
from ring_la.kernels.spans.table import Tiling

from ..ops.cases import CASES, Case, Shape, inputs
from ..ops.measure import errors, graph_times


@dataclass(frozen=True)
class Arm:
    """A name, and (object, attribute, value) that make calls take it; none: today's."""

    name: str
    changes: tuple[tuple[Any, str, Any], ...] = ()


def together(block: int, warps: int, stages: int) -> tuple[tuple[Any, str, Any], ...]:
    tiling = Tiling(block, warps, stages)
    return (shared_gradients, "TOGETHER", True), (table.SHARED_GRADIENT, "both", tiling)


WHAT = {
    "mamba2": [
        Arm("today"),
        Arm("together, 4 warps, 3 stages", together(64, 4, 3)),
        Arm("together, 4 warps, 2 stages", together(64, 4, 2)),
        Arm("together, 8 warps, 3 stages", together(64, 8, 3)),
    ],
    "mamba2 and a skip": [Arm("today"), Arm("beside", ((discretise, "BESIDE", True),))],
}
SHAPES = {"mamba2": ("1x32768x80x128x64", "1x4096x80x128x64"), "mamba2 and a skip": ("1x32768x80x128x64",)}


def case_of(name: str, shape: Shape) -> Case:
    if name != "mamba2 and a skip":
        return CASES[name]
    return Case("mamba2", (("D", torch.linspace(0.5, 1.5, shape.H, device="cuda")),))


def changed(arm: Arm) -> ExitStack:
    """The arm's changes, until this is closed."""
    stack = ExitStack()
    for where, name, value in arm.changes:
        if isinstance(where, dict):
            stack.enter_context(mock.patch.dict(where, dict.fromkeys(where, value)))
        else:
            stack.enter_context(mock.patch.object(where, name, value))
    return stack


def measured(case: Case, shape: Shape) -> dict[str, Any]:
    """Errors, and ms of forward and of both."""
    function = case.ours
    found: dict[str, Any] = {"errors": errors(case, function, shape, "cuda")}
    x = inputs(case, shape, "cuda")
    leaves = [t for t in x.values() if t.requires_grad]
    with torch.no_grad():
        do = torch.randn_like(function(x))

    def forward() -> None:
        with torch.no_grad():
            function(x)

    def both() -> None:
        torch.autograd.grad(function(x), leaves, do)

    for call, what in ((forward, "fwd"), (both, "fwd_bwd")):
        for _ in range(3):
            call()
        found |= graph_times(call, what)
    return found


def within(found: dict[str, float], today: dict[str, float]) -> bool:
    return all(e <= 1.3 * today[n] for n, e in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WHAT))
    parser.add_argument("--limit", type=float, default=120, help="seconds: no arm starts after them")
    args = parser.parse_args()
    began, right = time.monotonic(), True
    for name in args.only.split(","):
        today: dict[str, float] = {}
        for text in SHAPES[name]:
            shape = Shape.parse(text)
            for arm in WHAT[name]:
                if time.monotonic() - began > args.limit:
                    print(f"{name} {text} {arm.name}: no time left", flush=True)
                    continue
                with changed(arm):
                    found = measured(case_of(name, shape), shape)
                today = found["errors"] if not arm.changes else today
                fine = within(found["errors"], today)
                right = right and fine
                print(json.dumps({"op": name, "shape": text, "arm": arm.name, "right": fine} | found), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
