"""What one call costs the host: `python -m tests.gpu.bench_host --out folder`; with `torchrun`, the eager exchange too.

For every operator at a shape whose kernels take next to nothing, µs of the host, medians over calls none of which waits
for the GPU: forward without and with gradients, backward, how many kernels each launches and how much of the time those
launches take, and the same of fla-core where it is installed (--fla). --profile prints where the time of one goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ring_la
from ring_la.kernels.triton import launch as launching
from tests.conformance.cases import make_inputs

OPS = (
    "linear_attention", "retention", "lightning_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda",
    "rwkv7",
)  # fmt: skip
SHAPE = dict(B=1, T=512, Hk=4, H=4, K=64, V=64)
CALLS, ROUNDS = 10, 20
"""Calls in a row without waiting, and how often: few enough that the queue of launches never fills."""


class Launches:
    """Counts and times what goes through `launch`."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        real = launching.launch

        def timed(*args, **constants) -> None:
            start = time.perf_counter()
            real(*args, **constants)
            self.seconds += time.perf_counter() - start
            self.count += 1

        holders = [m for m in sys.modules.values() if getattr(m, "launch", None) is real and m is not launching]
        for module in holders:
            module.launch = timed
        try:
            yield
        finally:
            for module in holders:
                module.launch = real


def microseconds(call: Callable[[], Any]) -> float:
    """Median over rounds of a call's time on the host."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return round(sorted(times)[ROUNDS // 2] * 1e6, 1)


def backward_microseconds(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """The same of a backward, the forwards made before the clock starts."""
    times, do = [], torch.randn_like(forward())
    for _ in range(ROUNDS):
        outs = [forward() for _ in range(CALLS)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for o in outs:
            torch.autograd.grad(o, inputs, do)
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return round(sorted(times)[ROUNDS // 2] * 1e6, 1)


def operator(name: str, profile: bool) -> dict[str, Any]:
    """Host µs of one operator."""
    x = make_inputs(name, **SHAPE, dtype=torch.float32)
    x = {
        n: t.detach().cuda().bfloat16() if n in ("q", "k", "v", "r", "a", "b") else t.detach().cuda()
        for n, t in x.items()
    }
    if name == "lightning_attention":
        x.pop("g")
    wanting = {n: t.clone().requires_grad_() for n, t in x.items()}
    op, leaves = getattr(ring_la, name), list(wanting.values())
    forward = lambda: op(**wanting).o  # noqa: E731
    bare = lambda: op(**x).o  # noqa: E731
    for _ in range(3):
        bare(), torch.autograd.grad(forward(), leaves, torch.ones_like(forward()))
    row: dict[str, Any] = {"op": name, "fwd_no_grad": microseconds(bare), "fwd": microseconds(forward)}
    row["bwd"] = backward_microseconds(forward, leaves)
    for part, call in (("fwd", forward), ("both", lambda: torch.autograd.grad(forward(), leaves, do))):
        do, seen = torch.randn_like(forward()), Launches()
        with seen.watched():
            microseconds(call)
        calls = ROUNDS * CALLS
        row |= {f"{part}_launches": seen.count / calls, f"{part}_launch_us": round(seen.seconds / calls * 1e6, 1)}
    if profile:
        for call in (forward, lambda: torch.autograd.grad(forward(), leaves, do)):
            profiled = cProfile.Profile()
            profiled.enable()
            for _ in range(100):
                call()
            profiled.disable()
            torch.cuda.synchronize()
            pstats.Stats(profiled).sort_stats("tottime").print_stats(35)
    return row


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
                with g.in_order(ordered):
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
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank = int(os.environ.get("RANK", 0))
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ops": []}
    for name in args.ops.split(","):
        result["ops"].append(operator(name, args.profile and rank == 0))
        if rank == 0:
            print(result["ops"][-1], flush=True)
    if dist.is_initialized():
        result["exchanges"] = exchanges()
        if rank == 0:
            print(*result["exchanges"], sep="\n")
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "host.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
