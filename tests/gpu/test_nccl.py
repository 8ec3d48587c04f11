"""Sharded ≡ whole over NCCL, one rank a GPU: `torchrun --nproc_per_node N -m tests.gpu.check_nccl`.

Runs the conformance checks of the CPU suite on GPUs for every group size P ≤ N: every recurrence × scan × layout ×
packing in fp64 on the PyTorch backend (1e-9), and in fp32 and bf16 on the default backend (Triton where it can), moves
of tokens, convolutions. Each rank's worst errors are gathered; rank 0 prints one line a check and a summary last.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import ring_la
from ring_la.scan import STRATEGIES
from tests.conformance import test_sharded as sharded
from tests.conformance.cases import RECURRENCES, error, make_inputs
from tests.distributed import pool

PATIENCE = 45.0
"""Seconds one check may take before every rank shows where it stands and stops."""


def whole_and_split(rank: int, P: int, name: str, dtype: torch.dtype, kind: str, D: int) -> dict[str, float]:
    """The default backend on this rank's tokens against the fp64 PyTorch backend on the whole sequence.

    Returns the ratio of the error to the one-device call's own error in the same dtype, for the output and each input.
    """
    cp = ring_la.ContextParallel(pool.group(P), scan="auto")
    T, cu = 1500, (0, 0, 130, 131, 900, 1500)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    inputs = make_inputs(name, 1, T, Hk=2, H=4, K=D, V=D, dtype=torch.float64, seed=3)
    flags = {n: x for n, x in inputs.items() if not isinstance(x, torch.Tensor)}
    shared = {n for n, x in inputs.items() if n not in flags and x.dim() < 3}
    half = {
        n: x.detach().to(cp.device, torch.float32 if n in shared else dtype)
        for n, x in inputs.items()
        if n not in flags
    }
    do = torch.randn(1, T, 4, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(cp.device, dtype)

    def gradients(x, do, **keywords):
        x = {n: t.clone().requires_grad_() for n, t in x.items()}
        out = getattr(ring_la, name)(**x, **flags, **keywords).o
        grads = torch.autograd.grad((out * do).sum(), list(x.values()))
        return {"o": out.detach(), **{f"d{n}": g for n, g in zip(x, grads)}}

    offsets = torch.tensor(cu, device=cp.device)
    want = gradients({n: t.double() for n, t in half.items()}, do.double(), cu_seqlens=offsets, backend="torch")
    alone = gradients(half, do, cu_seqlens=offsets)
    local = {n: t if n in shared else layout.shard(t) for n, t in half.items()}
    got = gradients(local, layout.shard(do), layout=layout)
    floor = {n: max(error(g, want[n]), 1e-3 * torch.finfo(dtype).eps) for n, g in alone.items()}
    ratios = {}
    for n, g in got.items():
        if n[1:] in shared:  # a handful of numbers, whose own error is luck: judged by the call's largest
            ratios[n] = error(cp.comm.all_reduce(g).wait(), want[n]) / max(floor.values())
        else:
            ratios[n] = error(layout.gather(g), want[n]) / floor[n]
    return ratios


def checks(world: int):
    """(label, P, function of the rank giving its worst figure, bound)."""
    for P in [p for p in (2, 4, 8) if p <= world]:
        for name in RECURRENCES:
            for documents, kind in (
                ("dense", "zigzag"),
                ("packed", "zigzag"),
                ("packed", "contiguous"),
                ("uneven", "contiguous"),
                ("short", "zigzag"),
            ):
                f = functools.partial(
                    sharded.check_sharded, P=P, name=name, documents=documents, kind=kind, scans=tuple(STRATEGIES)
                )
                worst = lambda rank, f=f: max(e for by in f(rank).values() for e in by.values())  # noqa: E731
                yield f"fp64 {name} {documents} {kind}", P, worst, 1e-9
    for dtype in (torch.bfloat16, torch.float32):
        for name in RECURRENCES:
            for D in (64, 128):
                f = functools.partial(whole_and_split, P=world, name=name, dtype=dtype, kind="zigzag", D=D)
                yield f"{str(dtype)[6:]} {name} {D}", world, lambda rank, f=f: max(f(rank).values()), 2.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out")
    arguments.add_argument("--budget", type=float, default=300.0)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--verbose", action="store_true")
    arguments.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    options = arguments.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = None
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, device_id=device, timeout=timedelta(seconds=90))
    control = dist.new_group(backend="gloo")
    for P in range(1, world + 1):
        pool._groups[P] = dist.new_group(list(range(P)))
    start, rows = time.monotonic(), []
    for label, P, check, bound in checks(world):
        late = torch.tensor([time.monotonic() - start > options.budget])
        dist.broadcast(late, 0, group=control)
        if late.item():
            break
        if options.only not in label:
            continue
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        value, failed, began = 0.0, "", time.monotonic()
        if rank < P:
            try:
                value = check(rank)
            except Exception:
                value, failed = float("inf"), traceback.format_exc()
                print(f"rank {rank}, {label}, P={P}\n{failed}", flush=True)
        values: list = [None] * world
        dist.all_gather_object(values, (value, failed), group=control)
        faulthandler.cancel_dump_traceback_later()
        worst = max(v for v, _ in values)
        seconds = round(time.monotonic() - began, 2)
        rows.append({"check": label, "P": P, "worst": worst, "bound": bound, "ok": worst <= bound, "seconds": seconds})
        if rank == 0 and (options.verbose or not rows[-1]["ok"]):
            print("ok " if rows[-1]["ok"] else "BAD", rows[-1], flush=True)
        if any(t for _, t in values):
            break
    name = torch.cuda.get_device_name() if device else "cpu"
    if rank == 0:
        bad = sum(not r["ok"] for r in rows)
        by = {}
        for r in rows:
            key = (r["check"].split()[0], r["P"])
            by.setdefault(key, []).append(r["worst"])
        for (kind, P), worst in by.items():
            print(f"{kind} P={P}: {len(worst)} checks, worst {max(worst):.2e}")
        print(f"{len(rows)} checks, {bad} bad, {time.monotonic() - start:.0f} s, {world} × {name}")
        if options.out:
            with open(options.out, "w") as f:
                json.dump({"torch": torch.__version__, "device": name, "rows": rows}, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
