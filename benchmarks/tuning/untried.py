"""What calls do not take by default, or take without a GPU's word, beside the other: `python -m
benchmarks.tuning.untried [--only gla] [--limit SECONDS]`.

A line of JSON an arm: its errors against fp64 at the first shape, whether they stay within 1.3 times those of the first
arm, which is today's; ms of forward, and of forward and backward, as CUDA graphs; µs of the host for an eager forward,
and of the kernels of an eager forward and backward that take ten or more.
Ends with 1 if an arm is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from ring_la.kernels.fused import discretise
from ring_la.kernels.replay import root
from ring_la.kernels.runtime.replayed_function import record_of
from ring_la.kernels.scalar_decay import attend
from ring_la.kernels.spans import table
from ring_la.kernels.wy import one_launch

from ..errors import relative_error
from ..ops.cases import CASES, Inputs, Results, Shape, inputs, tensors
from ..ops.measure import graph_times, host_microseconds, results
from ..options import need_gpus
from ..timing import kernels

Op = Callable[[Inputs], Results]


@dataclass(frozen=True)
class Arm:
    """A function of the inputs, and (object, attribute, value) that are set while it runs."""

    name: str
    function: Op
    changes: tuple[tuple[Any, str, Any], ...] = ()

    def set(self) -> ExitStack:
        """Its changes, until this is closed; what was written down of another's calls is not replayed."""
        stack = ExitStack()
        root.cache_clear()
        record_of.cache_clear()
        for where, name, value in self.changes:
            stack.enter_context(mock.patch.object(where, name, value))
        return stack


@dataclass(frozen=True)
class Question:
    """Arms on the same inputs, of which the first is today's, and what is true. `tokens`: at which errors are taken."""

    draw: Callable[[Shape, str], Inputs]
    truth: Op
    arms: tuple[Arm, ...]
    shapes: tuple[str, ...]
    tokens: int = 512


# -- one launch each way ----------------------------------------------------------


def launched(forgets: bool) -> Question:
    """GLA in one launch each way, which is today's, and in chunks. Of gates that do not forget, every fourth head's."""
    case, arm = CASES["gla"], ((one_launch, "GLA_BY_LAUNCH", False),)

    def draw(shape: Shape, device: str) -> Inputs:
        x = inputs(case, shape, device)
        g = x["g"].detach().clone()
        if not forgets:
            g[:, :, ::4] = 0
        return x | {"g": g.requires_grad_()}

    shapes = ("1x32768x32x128", "1x32768x8x128", "1x8192x32x128", "1x2048x32x128", "8x4096x16x128")
    arms = Arm("today", case.ours), Arm("chunks", case.ours, arm)
    return Question(draw, case.truth, arms, shapes if forgets else shapes[:2])


def rwkv7(forgets: bool) -> Question:
    """RWKV-7 in one launch each way, which a bound of its gate allows and which is today's, and in chunks. Gates that
    do not forget: hundredths."""
    case = CASES["rwkv7"]

    def draw(shape: Shape, device: str) -> Inputs:
        x = inputs(case, shape, device)
        return x if forgets else x | {"w": (x["w"].detach() / 100).requires_grad_()}

    arms = Arm("today", case.ours), Arm("chunks", case.ours, ((one_launch, "DPLR_BY_LAUNCH", False),))
    shapes = "1x32768x32x128", "1x8192x32x128", "1x2048x32x128", "1x32768x8x128", "8x4096x16x128"
    return Question(draw, case.truth, arms, shapes if forgets else shapes[:1])


def mamba2(skips: bool) -> Question:
    """Mamba-2 by pairs of heads, its step and its skip in the recurrence's kernels, which is today's; and a head a
    program, Δ x made before."""
    case, was = CASES["mamba2"], ((table, "PAIRED", False), (discretise, "STEP_INSIDE", False))

    def draw(shape: Shape, device: str) -> Inputs:
        x = inputs(case, shape, device)
        return x | ({"D": torch.linspace(0.5, 1.5, shape.H, device=device).requires_grad_()} if skips else {})

    arms = Arm("today", case.ours), Arm("heads", case.ours, was)
    shapes = "1x32768x80x128x64", "1x4096x80x128x64", "8x4096x16x128x64"
    return Question(draw, case.truth, arms, shapes[:1] if skips else shapes)


def mamba2_passes() -> Question:
    """Its pass of o in Gluon, which is today's, and in Triton."""
    case = CASES["mamba2"]
    triton = Arm("o in Triton", case.ours, ((attend, "by_gluon", lambda plan: False),))
    return Question(partial(inputs, case), case.truth, (Arm("today", case.ours), triton), ("1x32768x80x128x64",))


QUESTIONS = {
    "gla": launched(forgets=True),
    "rwkv7": rwkv7(forgets=True),
    "gla_slow": launched(forgets=False),
    "rwkv7_slow": rwkv7(forgets=False),
    "mamba2_passes": mamba2_passes(),
    "mamba2_skip": mamba2(skips=True),
    "mamba2": mamba2(skips=False),
}


def errors(question: Question, arm: Arm, shape: Shape, device: str = "cuda") -> dict[str, float]:
    x = question.draw(shape.short(question.tokens), device)
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in x.items() if t.is_floating_point()}
    true = results(question.truth, x | wide)
    with arm.set():
        got = results(arm.function, x)
    return {n: float(f"{relative_error(got[n], true[n]):.2e}") for n in true}


def times(question: Question, arm: Arm, shape: Shape) -> dict[str, Any]:
    x = question.draw(shape, "cuda")
    with torch.no_grad():
        do = [torch.randn_like(t) for t in tensors(arm.function(x))]

    def forward() -> None:
        with torch.no_grad():
            arm.function(x)

    def both() -> None:
        torch.autograd.grad(tensors(arm.function(x)), [t for t in x.values() if t.requires_grad], do)

    found: dict[str, Any] = {}
    for call, name in ((forward, "fwd"), (both, "fwd_bwd")):
        with arm.set():
            for _ in range(3):
                call()
            found |= {f"{name}_host_us": host_microseconds(call)} | graph_times(call, name)
    with arm.set():
        for _ in range(3):
            both()
        return found | {"kernels_us": {name: round(us, 1) for name, _, us in kernels(both) if us >= 10}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(QUESTIONS))
    parser.add_argument("--limit", type=float, default=120, help="seconds: no arm starts after them")
    args = parser.parse_args()
    need_gpus(parser)
    began, right = time.monotonic(), True
    for name in args.only.split(","):
        question, today = QUESTIONS[name], {}
        for text in question.shapes:
            for arm in question.arms:
                if time.monotonic() - began > args.limit:
                    print(f"{name} {text} {arm.name}: no time left", flush=True)
                    continue
                row: dict[str, Any] = {"what": name, "shape": text, "arm": arm.name}
                if text == question.shapes[0]:
                    off = errors(question, arm, Shape.parse(text))
                    today = off if arm is question.arms[0] else today
                    row |= {"right": all(e <= 1.3 * today[n] + 1e-6 for n, e in off.items()), "errors": off}
                    right = right and row["right"]
                print(json.dumps(row | times(question, arm, Shape.parse(text))), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
