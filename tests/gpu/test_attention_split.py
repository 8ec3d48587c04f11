"""The calls of `check_attention` split over the GPUs of a torchrun job: strategies × layouts × transports × kernels.

Kernels are compiled first, by processes side by side; inputs and fp64 references are made once a (feature, width,
dtype). The matrix is covered in order of worth until the time is up; what was not reached is said, and is no pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la import ContextParallel
from ring_la.softmax import attention
from tests.gpu.check_attention import DEVICE, FEATURES, Report, T, draw, limits, one_device, run, truth
from tests.softmax.cases import error

KINDS, STRATEGIES = ("contiguous", "zigzag", "striped"), ("ring", "all_gather", "ulysses")
HALVES = (torch.bfloat16, torch.float16)
PATIENCE = 8
"""Seconds over its time that a run waits for a case."""


def split(cp: ContextParallel, backend: str, feature: str, D: int, dtype: torch.dtype, kind: str, strategy: str | None):
    """Errors of one call under a layout, of this rank's part of everything; or why the kernel refuses."""
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    want, layout = truth(feature, D, dtype), cp.layout(T, kind, cu_seqlens=cu)
    local = {n: (layout.shard(t) if n in "qkv" else t).to(dtype) for n, t in tensors.items()}
    more = dict(layout=layout, strategy=strategy, backend=backend)
    try:
        got = run(attention, local, layout.shard(do), layout.shard(dlse, dim=2), **how, **more)
    except ring_la.UnsupportedError as e:
        return str(e)
    shared = {
        n: cp.comm.all_reduce(g.float()).wait() for n, g in got.items() if n in ("dsinks", "djoint_k", "djoint_v")
    }
    parts = {n: layout.shard(t, dim=2 if n == "lse" else 1) for n, t in want.items() if n not in shared}
    return {n: error(shared.get(n, g), parts.get(n, want[n])) for n, g in got.items()}


def matrix(groups: list[str], backends: list[str], widths: list[int]) -> Iterator[tuple]:
    """(group, backend, feature, D, dtype, kind, strategy), the most telling first."""
    whole = [g for g in groups if g in ("torch", "auto")]
    kernels = [k for k in itertools.product(widths, HALVES, backends) if k[2] != "torch" or k[:2] == (64, HALVES[0])]
    for D, dtype, backend in kernels:  # every strategy × layout × kernel × width × dtype, by one feature
        for kind in KINDS:
            yield from ((g, backend, "gqa", D, dtype, kind, "ring") for g in whole)
            yield from ((whole[0], backend, "gqa", D, dtype, kind, s) for s in STRATEGIES[1:])
    turns = itertools.cycle(itertools.product(KINDS, STRATEGIES))
    for D, dtype, backend in kernels:
        yield from ((g, backend, "gqa", D, dtype, "zigzag", None) for g in groups if g == "mesh")
        yield from ((g, backend, "gqa", D, dtype, *next(turns)) for g in groups if g.startswith("half"))
    for n, D in enumerate(
        w for w in (128, 64) if w in widths
    ):  # every feature × strategy × transport × kernel; each width with other layouts
        for turn, (m, feature), backend in itertools.product(range(4), enumerate(FEATURES), backends):
            group, strategy = (
                [(g, "ring") for g in (whole * 2)[:2]][turn] if turn < 2 else (whole[0], STRATEGIES[turn - 1])
            )
            if backend != "torch" or D == 64:
                yield group, backend, feature, D, HALVES[0], KINDS[(m + n + turn) % 3], strategy
    for feature, backend in itertools.product(FEATURES, backends):
        yield from ((g, backend, feature, 64, HALVES[0], "zigzag", None) for g in groups if g == "mesh")


def compile_part(part: int, parts: int, device: int, backends: list[str], widths: list[int]) -> None:
    """One device's calls: the kernels that splits will want."""
    torch.cuda.set_device(device)
    wanted = [(f, D, d) for D in widths for d in HALVES for f in FEATURES if f == "gqa" or (d == HALVES[0] and D < 256)]
    for feature, D, dtype in wanted[part::parts]:
        if "triton" not in backends:
            return
        one_device("triton", feature, D, dtype)


def contexts(transports: list[str]) -> dict[str, ContextParallel]:
    """The whole group by each transport, a 2 × n mesh, and the half of the ranks that this one is in."""
    P, rank = dist.get_world_size(), dist.get_rank()
    out = {name: ContextParallel(scan="ring", transport=name) for name in transports}
    if P % 2 == 0 and P > 2:
        mesh = init_device_mesh("cuda", (P // 2, 2), mesh_dim_names=("ring", "ulysses"))
        out["mesh"] = ContextParallel(mesh, scan="ring", attention="usp", transport=transports[-1])
        halves = [dist.new_group(list(range(first, P, 2))) for first in (0, 1)]
        for name in transports:
            out[f"half {name}"] = ContextParallel(halves[rank % 2], scan="ring", transport=name)
    return out


def stalled_peer() -> str:
    """What this rank finds where the last rank stays away for longer than the timeout: the error that names it."""
    P, rank = dist.get_world_size(), dist.get_rank()
    cp = ContextParallel(scan="ring", timeout=2.0)
    layout = cp.layout(T, "zigzag")
    q, k, v = (torch.randn(1, layout.local_length, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if not attention(q, k, v, layout=layout, strategy="ring").o.isfinite().all():
        return "not finite before"
    found = f"no message from rank {P - 1}"
    if rank == P - 1:
        time.sleep(4)
    else:
        if not attention(q, k, v, layout=layout, strategy="ring").o.isnan().any():
            found = "what did not come is no NaN"
        try:
            attention(q, k, v, layout=layout, strategy="ring")
            found = "no error"
        except ring_la.errors.PeerError as error:
            found = found if found in str(error) else f"{found}; {error}"
    torch.cuda.synchronize()
    dist.barrier()
    return found


def deterministic(features: tuple[str, ...] = ("causal", "packed", "all")) -> list[str]:
    """What differs by a bit, with ``deterministic=True``: results on all ranks from those on half of them and under
    another layout, gradients from those of a second call. Collective."""
    P, rank, bad = dist.get_world_size(), dist.get_rank(), []
    halves = [dist.new_group(list(range(first, P, 2))) for first in (0, 1)]
    cps = [ContextParallel(group, deterministic=True) for group in (None, halves[rank % 2])]
    for feature in features:
        tensors, how, cu, do, dlse = draw(feature, 64, HALVES[0])
        first: list[torch.Tensor] = []
        for cp, kind in ((cps[0], "zigzag"), (cps[0], "contiguous"), (cps[1], "zigzag")):
            layout = cp.layout(T, kind, cu_seqlens=cu)
            local = {n: (layout.shard(t) if n in "qkv" else t).to(HALVES[0]) for n, t in tensors.items()}
            calls = [
                run(attention, local, layout.shard(do), layout.shard(dlse, dim=2), **how, layout=layout) for _ in "12"
            ]
            bad += [
                f"{feature} {kind} P{cp.size} {n} twice" for n, x in calls[0].items() if not torch.equal(x, calls[1][n])
            ]
            whole = [layout.gather(calls[0]["o"]), layout.gather(calls[0]["lse"], dim=2)]
            first = first or whole
            if not all(map(torch.equal, first, whole)):
                bad.append(f"{feature} {kind} P{cp.size}")
    return bad


class Progress:
    """What was compared so far, printed and saved by rank 0 at times, so that a run cut off still counts."""

    def __init__(self, report: Report, planned: int, path: str | None, start: float) -> None:
        self.report, self.path, self.start, self.said = report, path, start, start
        self.reached, self.bad, self.worst, self.now, self.counts = 0, 0, 0.0, "", {}
        self.summary = dict(P=dist.get_world_size(), device=torch.cuda.get_device_name(), torch=torch.__version__)
        self.summary |= dict(planned=planned)

    def agreed(self) -> float:
        """The seconds since the start; with them the ranks agree on what is off and the worst error. Collective."""
        mine = torch.tensor(
            [time.time() - self.start, self.report.bad, self.report.worst], device=DEVICE, dtype=torch.float64
        )
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        seconds, bad, self.worst = mine.tolist()
        self.bad = int(bad)
        return seconds

    def begin(self, name: str) -> None:
        """A case begins."""
        self.now, self._before = name, self.report.done
        if time.time() - self.said > 10:
            self.say()

    def end(self, *what: str) -> None:
        """It was compared, if its kernel did not refuse it."""
        for of in what:
            self.counts[of] = self.counts.get(of, 0) + self.report.done - self._before
        self.reached, self.now = self.reached + 1, ""

    def say(self) -> None:
        """Print and save a summary."""
        self.said = time.time()
        if self.report.rank:
            return
        out = self.summary | dict(compared=self.report.done, off=self.bad, worst=self.worst, reached=self.reached)
        out |= dict(seconds=round(self.said - self.start), inside=self.now)
        print(json.dumps(out), flush=True)
        if self.path:
            with open(self.path, "w") as file:
                json.dump(out | dict(by=self.counts), file, indent=1)

    def give_up(self) -> None:
        """End this process where a case does not come back."""
        print(f"rank {self.report.rank} did not come back from: {self.now or 'an agreement'}", flush=True)
        self.say()
        time.sleep(2 * bool(self.report.rank))  # torchrun ends rank 0 as soon as another rank has ended
        os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cudnn,flash,triton,torch")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--transports", default="torch,auto")
    parser.add_argument("--jobs", type=int, default=10, help="processes a rank that compile")
    parser.add_argument("--seconds", type=float, default=150, help="time for all; 0: compile only")
    parser.add_argument("--skip", type=int, default=0, help="cases of the matrix to leave out, the first ones")
    parser.add_argument(
        "--part", default="0/1", help="which of how many parts of the matrix, where jobs run side by side"
    )
    parser.add_argument("--deterministic", action="store_true", help="compare bits of deterministic calls, at the end")
    parser.add_argument("--stall", action="store_true", help="have the last rank stay away once, at the end")
    parser.add_argument("--out")
    args = parser.parse_args()
    start, rank, local = time.time(), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    P, backends, widths = int(os.environ["WORLD_SIZE"]), args.backends.split(","), [*map(int, args.widths.split(","))]
    parts = P * args.jobs
    spawn = multiprocessing.get_context("spawn")
    jobs = [
        spawn.Process(target=compile_part, args=(rank * args.jobs + i, parts, local, backends, widths))
        for i in range(args.jobs)
    ]
    for job in jobs:
        job.start()
    for job in jobs:  # what is not compiled in time is compiled where it is met
        job.join(max(0.0, start + args.seconds / 2 - time.time()) if args.seconds > 0 else None)
        job.terminate()
    if args.seconds <= 0:
        return 0
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    groups, report = contexts(args.transports.split(",")), Report(rank, quiet=True)
    if rank == 0:
        print(f"compiled and connected after {time.time() - start:.0f} s", flush=True)
    part, of = map(int, args.part.split("/"))
    todo = list(matrix(list(groups), backends, widths))[args.skip + part :: of]
    progress = Progress(report, len(todo), args.out, start)
    guard = threading.Timer(max(0.0, start + args.seconds + PATIENCE - time.time()), progress.give_up)
    guard.daemon = True
    guard.start()
    for group, backend, feature, D, dtype, kind, strategy in todo:
        if progress.agreed() > args.seconds:
            break
        cp = groups[group]
        name = f"{group} P{cp.size} {kind} {strategy or 'usp'} {backend} {feature} D{D} {str(dtype)[6:]}"
        progress.begin(name)
        report.attempt(name, limits(dtype, D), split, cp, backend, feature, D, dtype, kind, strategy)
        if report.failed:  # the others may be waiting inside this call
            progress.say()
            sys.exit(f"stopped at case {progress.reached + 1} of {len(todo)}")
        progress.end(f"{group} {strategy or 'usp'} {backend}", feature)
    guard.cancel()
    if args.deterministic:
        differs = deterministic()
        print(f"deterministic, rank {rank}: {', '.join(differs) or 'the same bits'}", flush=True)
        report.bad += len(differs)
    if args.stall:
        found = stalled_peer()
        print(f"a stalled peer, rank {rank}: {found}", flush=True)
        report.bad += found != f"no message from rank {P - 1}"
    progress.agreed()
    progress.say()
    dist.destroy_process_group()
    return int(progress.bad > 0 or progress.reached < len(todo))
