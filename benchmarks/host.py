"""What one call costs the host: `python -m benchmarks.host --out folder`; with `torchrun`, the eager exchange too.

For every operator at a shape where the host is the bound, µs of the host, medians over calls none of which waits
for the GPU: forward without and with gradients, backward, how many kernels each launches and how long a call spends in
launching them. The backward of a Function that does nothing ("engine") is what autograd itself takes: it hands over to
a thread of its own and back. --fla: the same of fla-core (it tunes itself first: name few operators). --profile prints
where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ring_la
from benchmarks.options import join_gpus, need_gpus
from tests.support.recurrence_cases import make_inputs

from .peers import ops as peers
from .rows import machine, save
from .tapes import TapesOfACall
from .timing import host, now

OPS = (
    "linear_attention", "retention", "lightning_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule",
    "kda", "rwkv7", "mamba2", "bidirectional",
)  # fmt: skip
FORMS = {"bidirectional": ("linear_attention", {"causal": False}), "mamba2": ("mamba2", {"dt_softplus": True})}
"""Function and keywords of those that are not functions of tensors alone."""
SHAPE = dict(B=4, T=4096, Hk=16, H=16, K=64, V=64)
NARROW = "q", "k", "v", "r", "a", "b", "x", "B", "C", "dt"
CALLS, ROUNDS = 10, 20
"""Calls in a row without waiting, and how often: few enough that the queue of launches never fills."""


class Nothing(torch.autograd.Function):
    """An operator's inputs, and no work but room for their gradients."""

    @staticmethod
    def forward(ctx, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])
        return tensors[0].view_as(tensors[0])

    @staticmethod
    def backward(ctx, do: torch.Tensor):
        return do, *[x.new_empty(x.shape) for x in ctx.saved_tensors]


def microseconds(call: Callable[[], Any]) -> float:
    """Median over rounds of a call's time on the host."""
    return round(statistics.median_high(host(call, CALLS) for _ in range(ROUNDS)) * 1e6, 1)


def backward_microseconds(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """The same of a backward, the forwards made before the clock starts."""
    times, do = [], torch.randn_like(forward())
    for _ in range(ROUNDS):
        outs = [forward() for _ in range(CALLS)]
        start = now()
        for o in outs:
            torch.autograd.grad(o, inputs, do)
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return round(statistics.median_high(times) * 1e6, 1)


def drawn(name: str, shape: dict[str, int] = SHAPE) -> dict[str, torch.Tensor]:
    """Inputs of an operator, by name."""
    made = make_inputs(FORMS.get(name, (name,))[0], **shape, dtype=torch.float32)
    x = {n: t.detach().cuda() for n, t in made.items() if isinstance(t, torch.Tensor)}
    if name == "lightning_attention":
        x.pop("g")
    return {n: t.bfloat16() if n in NARROW else t for n, t in x.items()}


def operation(name: str) -> Callable[..., torch.Tensor]:
    """The output of an operator."""
    function, keywords = FORMS.get(name, (name, {}))
    return lambda **x: getattr(ring_la, function)(**keywords | x).o


def measured(op: Callable[..., torch.Tensor], x: dict[str, torch.Tensor]) -> dict[str, float]:
    """Host µs of forward and backward."""
    wanting = {n: t.clone().requires_grad_() for n, t in x.items()}
    leaves, do = list(wanting.values()), torch.randn_like(op(**x))
    for _ in range(4):
        op(**x), torch.autograd.grad(op(**wanting), leaves, do)
    row = {"fwd_no_grad": microseconds(lambda: op(**x)), "fwd": microseconds(lambda: op(**wanting))}
    row["bwd"] = backward_microseconds(lambda: op(**wanting), leaves)
    row["engine"] = backward_microseconds(lambda: Nothing.apply(*leaves), leaves)
    return row


def operator(name: str, fla: bool) -> dict[str, Any]:
    """Host µs of one operator, and of its peer."""
    x, op = drawn(name), operation(name)
    row: dict[str, Any] = {"op": name} | measured(op, x)
    wanting = {n: t.clone().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(op(**x))
    whole = lambda: torch.autograd.grad(op(**wanting), list(wanting.values()), do)  # noqa: E731
    for part, call in (("fwd", lambda: op(**wanting)), ("both", whole)):
        with TapesOfACall() as tapes:
            call()
        found = tapes.parts(microseconds)
        launching = round(found["us_tapes"] - found["us_allocations"], 1)
        row |= {f"{part}_launches": found["launches"], f"{part}_launching": launching}
    if fla:
        peer = peers.fla(name)
        row["fla"] = measured(lambda **x: peer(x), x)
    return row


def profiled(name: str) -> None:
    """Print where the time of a forward goes, and of both."""
    x, op = drawn(name), operation(name)
    wanting = {n: t.clone().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(op(**x))
    forward = lambda: op(**wanting)  # noqa: E731
    for call in (forward, lambda: torch.autograd.grad(forward(), list(wanting.values()), do)):
        for _ in range(4):
            call()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(100):
            call()
        profile.disable()
        torch.cuda.synchronize()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def sharded() -> list[dict[str, Any]]:
    """Host µs of calls on a split sequence, 4,096 tokens and 32 heads a rank, K = V = 128, beside whole ones."""
    rows, shape = [], dict(B=1, T=4096, Hk=32, H=32, K=128, V=128)
    layouts: dict[str, dict[str, Any]] = {"whole": {}}
    for transport in ("auto", "symmetric", "torch"):
        cp = ring_la.ContextParallel(transport=transport)
        layouts[transport] = {"layout": cp.layout(4096 * cp.size, "contiguous")}
    for name in ("simple_gla", "gated_delta_rule", "kda", "attention"):
        x = drawn("linear_attention" if name == "attention" else name, shape)
        for transport, split in layouts.items():
            row = measured(lambda **x: getattr(ring_la, name)(**x, **split).o, x)  # noqa: B023
            rows.append({"op": name, "transport": transport} | row)
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    return rows


def exchanges() -> list[dict[str, Any]]:
    """Host µs of eager messages of 2 MiB by both transports, in the stream's order and beside it."""
    from ring_la.comm import Group

    rows = []
    for transport in ("symmetric", "torch"):
        g = Group(None, timedelta(seconds=60), transport)
        x = torch.randn(1 << 19, device=g.device)
        room, right, left = torch.empty_like(x), (g.rank + 1) % g.size, (g.rank - 1) % g.size
        patterns = {
            "swap": lambda: g.exchange({right: x}, {left: room}).wait(),  # noqa: B023
            "all_gather": lambda: g.all_gather(x).wait(),  # noqa: B023
        }
        for pattern, call in patterns.items():
            for ordered in (True, False):
                with g.streams.in_order(ordered):
                    for _ in range(3):
                        call()
                    rows.append(
                        {"transport": transport, "pattern": pattern, "in_order": ordered, "us": microseconds(call)}
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    need_gpus(parser)
    if "RANK" in os.environ:
        join_gpus(parser)
    rank = int(os.environ.get("RANK", 0))
    result: dict[str, Any] = machine() | {"shape": SHAPE}

    def note(part: str, rows: list[dict[str, Any]]) -> None:
        """Keep what was found so far."""
        result[part] = rows
        if rank == 0:
            print(rows[-1], flush=True)
            save(args.out / "host.json", result)

    rows: list[dict[str, Any]] = []
    for name in args.ops.split(","):
        rows.append(operator(name, args.fla))
        note("ops", rows)
        if args.profile and rank == 0:
            profiled(name)
    if dist.is_initialized():
        note("exchanges", exchanges())
        note("sharded", sharded())


if __name__ == "__main__":
    main()
