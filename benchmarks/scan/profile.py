"""Where a split call's time goes: `torchrun --nproc_per_node 4 -m benchmarks.scan.profile --out folder`.

For each op, length and arm (this rank's tokens alone, the split path on a group of one, strategies over both
transports): microseconds eager and as a CUDA graph, the host's time to launch one call, and the timeline of one replay
on the rank in the middle: every kernel's start, duration and stream. Written to folder/profile.json as it goes.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from benchmarks.options import join_gpus
from tests.support.split_calls import both_ways, captured, inputs

from ..rows import save
from ..symmetric import microseconds
from ..timing import host, largest

ARMS = ("local", "alone", "torch all_gather", "symmetric all_gather", "symmetric ring", "torch ring")


def layouts(T: int, arms: list[str], alone: dist.ProcessGroup) -> dict[str, object]:
    out: dict[str, object] = {}
    for arm in arms:
        if arm == "local":
            out[arm] = None
            continue
        transport, _, scan = arm.partition(" ")
        cp = context(scan or "ring", transport if scan else "torch", None if scan else alone)
        out[arm] = cp.layout(T * cp.size, "contiguous")
    return out


@functools.cache
def context(scan: str, transport: str, group: object) -> ring_la.ContextParallel:
    return ring_la.ContextParallel(group, scan=scan, transport=transport, validate="never", timeout=20)


def launching(run, calls: int = 10) -> float:
    """Microseconds the host needs for one call when it waits for nothing."""
    torch.cuda.synchronize()
    dist.barrier()
    return round(host(run, calls) * 1e6, 1)


def timeline(run) -> list[tuple[str, int, float, float]]:
    """(kernel, stream, start, duration) in µs of one call, from its first kernel on."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    first = min((e.start_ns() for e in events), default=0)
    rows = [
        (e.name()[:60], e.device_resource_id(), (e.start_ns() - first) / 1e3, e.duration_ns() / 1e3) for e in events
    ]
    return sorted(rows, key=lambda row: row[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/profile_scan"))
    parser.add_argument("--ops", default="simple_gla,gated_delta_rule")
    parser.add_argument("--lengths", default="16384,4096")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--traced", default="local,symmetric all_gather,torch all_gather,symmetric ring")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    began = time.monotonic()
    join_gpus(parser)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    middle, rows = dist.get_rank() == min(2, dist.get_world_size() - 1), []
    for T in map(int, args.lengths.split(",")):
        for op in args.ops.split(","):
            x, do = inputs(op, T, 32, 0), torch.randn(1, T, 32, 128, device="cuda").bfloat16()
            for arm, layout in layouts(T, args.arms.split(","), alone).items():
                if largest([time.monotonic() - began])[0] > args.seconds:
                    continue
                run = functools.partial(both_ways, op, x, do, layout)
                row = dict(op=op, T=T, arm=arm, eager=microseconds(run, 12), host=launching(run))
                replay = captured(run)
                row["graph"] = microseconds(replay, 12)
                if arm in args.traced.split(","):
                    row["timeline"] = timeline(replay)
                    row["timeline eager"] = timeline(run)
                rows.append(row)
                if middle:
                    print({k: v for k, v in row.items() if not k.startswith("timeline")}, flush=True)
                    save(args.out / "profile.json", rows, indent=None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
