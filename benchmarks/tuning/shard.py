"""One rank's shard of a split gated delta rule or KDA, by kernels in chunks of 64 tokens and by those in CUDA C++ (see
`wy/scanned_spans`): `python -m benchmarks.tuning.shard [--ops gdn,kda] [--arms spans,alone] [--errors] [--parts]
[--profile] [--tokens 8192,32768]`.

Gates are those of production: of gdn logsigmoid(x) / 16 in three quarters of the heads and 0 in the others, of kda
-5 sigmoid(x), of kda_slow -0.002 Phi(x). What another rank sends is there
at once, both ways, so that this is the kernels' time alone, as on a rank in the middle. A line of JSON an arm: ms of a
CUDA graph of the forward, and of forward and backward; with --errors those of all results against fp64 at 512 tokens
instead. "alone": one device, the same states given by its caller; "share": its time over that of spans. With --parts a
line for each part of a call by spans, a graph of its own, and how many of its heads' spans have a transition of 0; with
--profile also the kernels of a call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ring_la import reference
from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, Inputs, OutputUse
from ring_la.kernels.wy import gdn_launches, one_launch
from ring_la.kernels.wy.scanned_spans import ScannedSpans, SpansLeft
from tests.support.arrived import Arrived

from ..ops.cases import Shape
from ..ops.measure import error, milliseconds
from ..ops.production import inputs
from ..options import need_gpus


class Op(NamedTuple):
    """Gates, heads, the rule and what is true."""

    gates: str
    heads: str
    rule: Rule
    truth: Callable[..., Any]


BOUNDED = Rule("delta", "diagonal", lower_bound=-5.0)
OPS = {
    "gdn": Op("qwen", "16:32", Rule("delta", "scalar"), reference.gated_delta_rule),
    "kda": Op("kimi", "32", BOUNDED, reference.kda),
    "kda_slow": Op("slow", "32", BOUNDED, reference.kda),
}
ARMS = ("chunks", "spans", "alone")


class Shard:
    """A rank's tokens, and what it does with them."""

    def __init__(self, tokens: int, op: Op) -> None:
        self.op = op
        x = inputs(op.gates, Shape.parse(f"1x{tokens}x{op.heads}x128"), "cuda", 0)
        self.inputs = Inputs(*(x[n].detach() for n in ("q", "k", "v", "g", "beta")))
        if op.rule.write == "additive":
            self.inputs = self.inputs._replace(beta=None)
        H = self.inputs.v.shape[2]
        self.states = tuple(torch.randn(1, 1, H, 128, 128, device="cuda") for _ in range(2))
        self.do = torch.randn_like(self.inputs.v)

    def run(self, arm: str, train: bool) -> list[Tensor]:
        """o and the leaving state, and if `train` all gradients."""
        S, dS = self.states
        alone = arm == "alone"
        border = None if alone else Arrived(S, dS)
        use = OutputUse(saved=train, alone=alone)
        least = one_launch.Least(0, 0, 0) if arm.startswith("spans") else one_launch.Least()
        across = mock.patch.object(one_launch, "ACROSS", least)
        _, _, length = arm.partition(" of ")
        cut = mock.patch.object(gdn_launches, "across", return_value=(int(length),) * 2) if length else nullcontext()
        with across, cut, mock.patch.object(one_launch, "LEAST", 0):
            local = recurrence(self.op.rule, self.inputs, None, 128**-0.5, use)
            if self.op.rule.transition != "dense" and not alone:
                return self._by_summary(local, train)
            out = local.output(S if alone else None, border=border)
            if not train:
                return [out.o, out.leaving]
            back = Backward(S if alone else None, self.do, tuple(out.saved))
            grads = local.gradients(back, dS if alone else None, border=border)
        return [out.o, out.leaving, *(t for t in grads.inputs if t is not None)]

    def _by_summary(self, local: Any, train: bool) -> list[Tensor]:
        """The same without a border, by a summary of the shard."""
        S, dS = self.states
        summary = local.summary(None, True)
        out = local.output(S, summary)
        if not train:
            return [out.o, out.leaving]
        back = Backward(S, self.do, tuple(out.saved))
        grads = local.gradients(back, dS, local.adjoint(back, None))
        return [out.o, out.leaving, *(t for t in grads.inputs if t is not None)]

    def truth(self) -> list[Tensor]:
        S, dS = (t[0].double() for t in self.states)
        leaves = [t.double().requires_grad_() for t in self.inputs if t is not None]
        out = self.op.truth(*leaves, initial_state=S, output_final_state=True)
        return [*out, *torch.autograd.grad(tuple(out), leaves, (self.do.double(), dS))]


NAMES = ("o", "S", "dq", "dk", "dv", "dg", "dbeta")


def check(name: str) -> bool:
    """Whether no error is above 6e-3, or twice that in chunks."""
    shard = Shard(512, OPS[name])
    true, floor, right = shard.truth(), [0.0] * len(NAMES), True
    for arm in ARMS:
        found = [error(a.reshape(b.shape), b) for a, b in zip(shard.run(arm, True), true, strict=True)]
        floor = found if arm == "chunks" else floor
        right = right and all(e <= max(6e-3, 2 * f) for e, f in zip(found, floor, strict=True))
        print(
            json.dumps({"op": name, "arm": arm, "errors": {n: float(f"{e:.2e}") for n, e in zip(NAMES, found)}}),
            flush=True,
        )
    return right


def graph(call: Callable[[], object]) -> Callable[[], None]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        call()
    return made.replay


def times(op: str, tokens: int, arms: list[str]) -> None:
    shard, found = Shard(tokens, OPS[op]), {}
    for arm in arms:
        row: dict[str, object] = {"op": op, "tokens": tokens, "heads": shard.op.heads, "arm": arm}
        for name, train in (("fwd", False), ("both", True)):
            call = graph(lambda arm=arm, train=train: shard.run(arm, train))  # type: ignore[misc]
            row[name] = found[arm, name] = round(milliseconds(call, "cuda", 0.05), 4)
        print(json.dumps(row), flush=True)
    if {"spans", "alone"} <= {*arms}:
        share = {name: round(found["alone", name] / found["spans", name], 3) for name in ("fwd", "both")}
        print(json.dumps({"op": op, "tokens": tokens, "share": share}), flush=True)


def parts(op: str, tokens: int) -> None:
    """ms of what a call by spans is made of, each from what the part before it has left."""
    shard, rule, no = Shard(tokens, OPS[op]), OPS[op].rule, None
    border, kernels = Arrived(*shard.states), one_launch.choice(rule, shard.inputs, OutputUse(alone=True)).across
    run = ScannedSpans.of(kernels, rule.plain, shard.inputs, no, 128**-0.5, OutputUse(saved=True))
    maps = run.kernels.maps(run.call)
    entered = run.entered(maps, no, border, False)
    out = run.output(no, border=border)
    back = Backward(no, shard.do, tuple(out.saved))
    left = SpansLeft.of(back.saved)
    maps_back = run.maps_back(back)
    came = run.entered(maps_back, no, border, True, left.through)
    steps: dict[str, Callable[[], object]] = {
        "maps": lambda: run.kernels.maps(run.call),
        "scans": lambda: run.entered(maps, no, border, False),
        "output": lambda: run.kernels.output(run.call, entered.entering, True),
        "maps back": lambda: run.maps_back(back),
        "scans back": lambda: run.entered(maps_back, no, border, True, left.through),
        "gradients": lambda: run.kernels.gradients(run.call, came.entering, left.rest, shard.do, None),
    }
    spans = {"count": maps.own.shape[1], "of 0": round(maps.zero.float().mean().item(), 3)}
    print(json.dumps({"op": op, "tokens": tokens, "spans": spans}), flush=True)
    for name, step in steps.items():
        row = {"op": op, "tokens": tokens, "part": name, "ms": round(milliseconds(graph(step), "cuda", 0.05), 4)}
        print(json.dumps(row), flush=True)


def profile(op: str, tokens: int, arms: list[str]) -> None:
    """µs of every kernel of a call."""
    shard = Shard(tokens, OPS[op])
    for arm in arms:
        shard.run(arm, True)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            shard.run(arm, True)
            torch.cuda.synchronize()
        events = sorted((e for e in found.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
        for e in events:
            row = {
                "op": op,
                "tokens": tokens,
                "arm": arm,
                "kernel": e.name[:40],
                "us": round(e.time_range.elapsed_us(), 1),
            }
            print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="8192,32768,4096,16384,2048")
    parser.add_argument("--ops", default="gdn,kda")
    parser.add_argument("--lengths", default="", help="of spans of gdn, tokens: an arm each")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=float, default=120, help="seconds: no op's rows of a kind start after them")
    args = parser.parse_args()
    need_gpus(parser)
    began, ops = time.monotonic(), args.ops.split(",")
    if args.errors:
        return 0 if all([check(op) for op in ops]) else 1
    for tokens in map(int, args.tokens.split(",")):
        for op in ops:
            lengths = args.lengths.split(",") if args.lengths and op == "gdn" else []
            arms = [*args.arms.split(","), *(f"spans of {n}" for n in lengths)]
            asked = [partial(times, arms=arms)] + [parts] * args.parts + [partial(profile, arms=arms)] * args.profile
            for rows in asked:
                if time.monotonic() - began < args.limit:
                    rows(op, tokens)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
