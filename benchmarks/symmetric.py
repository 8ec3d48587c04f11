"""What symmetric memory costs beside NCCL: `torchrun --nproc_per_node N -m benchmarks.symmetric --out folder`.

Parts, each written to folder/symmetric.json when it is done:

    links       µs of each strategy's exchange of states alone, by either transport, eager and in a CUDA graph
    exposed     one call's time beside the local work alone, and by the profiler the time in which only messages run
    graph       µs of forward and backward of a sharded call, captured and eager
    latency     µs of each pattern by size, eager and in a CUDA graph

That what is sent is right is for tests/gpu/test_symmetric.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from benchmarks.options import join_gpus
from ring_la.algebra import Affine
from ring_la.comm import Group
from ring_la.scan import STRATEGIES
from tests.support.split_calls import both_ways, captured, inputs

from .rows import machine, save
from .scan.arms import exchanges
from .timing import gaps, largest

TRANSPORTS = ("torch", "symmetric")
CALLS = [(name, T) for T in (16384, 4096) for name in ("simple_gla", "gated_delta_rule")]
HEADS = 32


def groups() -> dict[str, Group]:
    return {t: Group(None, timedelta(seconds=60), t) for t in TRANSPORTS}


@functools.lru_cache
def context(scan: str, transport: str) -> ring_la.ContextParallel:
    return ring_la.ContextParallel(scan=scan, transport=transport)


def say(row: object) -> None:
    if dist.get_rank() == 0:
        print(row, flush=True)


def microseconds(run, repeats: int = 20) -> float:
    """Median over calls of the slowest rank."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    return round(statistics.median_low(largest(gaps(run, repeats))) * 1e3, 1)


def links() -> dict:
    """By kind of map: µs, eager and in a graph, of each strategy's exchange alone."""
    by, out = groups(), {}
    for kind in ("identity", "scalar", "diagonal", "dense"):
        out[kind] = {}
        for transport, group in by.items():
            runs = exchanges(group, Affine(kind, None, torch.empty(1, HEADS, 128, 128, device="meta")))
            out[kind][transport] = {n: (microseconds(run), microseconds(captured(run))) for n, run in runs.items()}
        say({kind: out[kind]})
    return out


def latency() -> list[dict]:
    by, out = groups(), []
    for size in (64, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20):
        for transport in TRANSPORTS[::-1]:
            row = {"KiB": size / 1024, "transport": transport} | patterns(by[transport], size)
            out.append(row)
            say(row)
    return out


def patterns(g: Group, size: int) -> dict[str, float]:
    """Microseconds of each pattern for messages of `size` bytes."""
    x = torch.randn(size // 4, device=g.device)
    room, rows = torch.empty_like(x), x[: x.numel() // g.size * g.size].view(g.size, -1)
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    runs = {
        "swap": lambda: g.exchange({right: x}, {left: room}).wait(),
        "all_gather": lambda: g.all_gather(x).wait(),
        "all_to_all": lambda: g.all_to_all(rows).wait(),
        "all_reduce": lambda: g.all_reduce(x).wait(),
        "chain": lambda: chain(g, x),
    }
    out = {name: microseconds(run, 15) for name, run in runs.items()}
    if size <= 8 << 20:
        out |= {f"{name} graph": microseconds(captured(runs[name]), 15) for name in ("swap", "all_gather")}
    return out


def chain(g: Group, x: torch.Tensor) -> None:
    if g.rank:
        x = g.recv(x.shape, x.dtype, x.device, g.rank - 1).wait()
    if g.rank < g.size - 1:
        g.send(x, g.rank + 1).wait()


def graph() -> dict:
    """µs of one call, replayed and eager, by transport, operator and strategy."""
    out, T = {}, 4096
    for transport in TRANSPORTS[::-1]:
        scans = ("ring", "all_gather") if transport == "torch" else tuple(STRATEGIES)
        for name in ("simple_gla", "gated_delta_rule"):
            x, do = inputs(name, T, HEADS, 0), torch.randn(1, T, HEADS, 128, device="cuda").bfloat16()
            for scan in scans:
                layout = context(scan, transport).layout(T * dist.get_world_size(), "contiguous")
                run = functools.partial(both_ways, name, x, do, layout)
                row = {"graph us": microseconds(captured(run), 8), "eager us": microseconds(run, 8)}
                out[f"{transport} {name} {scan}"] = row
                say((transport, name, scan, row))
    return out


def exposed() -> list[dict]:
    """Exposed communication by strategy and transport, by difference and by the profiler's trace."""
    rows = []
    for name, T in CALLS:
        x, do = inputs(name, T, HEADS, 0), torch.randn(1, T, HEADS, 128, device="cuda").bfloat16()
        arms = {"local": None}
        for transport in TRANSPORTS:
            for scan in ("ring", "all_gather", "all_to_all"):
                cp = context(scan, transport)
                arms[f"{transport} {scan}"] = cp.layout(T * cp.size, "contiguous")
        runs = {arm: functools.partial(both_ways, name, x, do, layout) for arm, layout in arms.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(3):
            for arm, run in runs.items():
                best[arm] = min(best[arm], microseconds(run, 6))
        for arm, run in runs.items():
            row = {"op": name, "T": T, "arm": arm, "us": best[arm], "share": round(best["local"] / best[arm], 3)}
            row |= traced(run) if T == 16384 and arm != "local" else {}
            if arm == "local" or "all_gather" in arm:
                try:
                    row["graph us"] = microseconds(captured(run), 8)
                except Exception as error:  # a transport that cannot be captured is a line of the table
                    row["graph us"] = repr(error)[:200]
            rows.append(row)
            say(row)
    return rows


def traced(run, calls: int = 4) -> dict:
    """Microseconds a call: kernels' time on the busiest stream, on the others, and on those while it stood still."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    names: dict[str, float] = {}
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams.setdefault(e["args"]["stream"], []).append((e["ts"], e["ts"] + e["dur"]))
            names[e["name"][:48]] = names.get(e["name"][:48], 0) + e["dur"] / calls
    busiest = max(streams, key=lambda s: sum(b - a for a, b in streams[s]))
    main = union(streams[busiest])
    others = union([i for s, spans in streams.items() if s != busiest for i in spans])
    host = sum(e["dur"] for e in events if e.get("cat") == "cuda_runtime" and "Launch" in e.get("name", "")) / calls
    return {
        "main busy": round(length(main) / calls, 1),
        "others busy": round(length(others) / calls, 1),
        "exposed": round((length(union([*main, *others])) - length(main)) / calls, 1),
        "idle": round((main[-1][1] - main[0][0] - length(union([*main, *others]))) / calls, 1),
        "host launches": round(host, 1),
        "kernels": sum(len(s) for s in streams.values()) // calls,
        "top": {n: round(t, 1) for n, t in sorted(names.items(), key=lambda i: -i[1])[:12]},
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def length(spans: list[tuple[float, float]]) -> float:
    return sum(b - a for a, b in spans)


PARTS = {"links": links, "exposed": exposed, "graph": graph, "latency": latency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/symmetric"))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no part is started")
    args = parser.parse_args()
    join_gpus(parser)
    start = time.monotonic()
    result = machine() | {"ranks": dist.get_world_size()}
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        late = torch.tensor([time.monotonic() - start > args.budget], device="cuda", dtype=torch.int32)
        dist.all_reduce(late)
        if late.item():
            say(f"{part}: no time left")
            continue
        began = time.monotonic()
        result[part] = {"value": PARTS[part](), "seconds": round(time.monotonic() - began, 1)}
        if dist.get_rank() == 0:
            save(args.out / "symmetric.json", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
