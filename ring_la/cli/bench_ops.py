"""Every linear recurrence on one GPU against fla-core, in one run: errors first, then times and peak memory.

    ring-la bench ops [--ops gla,kda] [--shapes 1x32768x32x128,…] [--warm SECONDS] [--out FILE.json]

Times are medians of CUDA events; the peer runs beside ours on the same tensors. Errors are those of the output and of
every gradient against an fp64 run of the PyTorch kernels on the same (rounded) inputs. FLA returns tuples: its output
is the first element. FLA's guard against the Triton its gated backward miscompiles with is switched off (#640); that is
why its errors are checked too. An op whose error is off is not timed. A peer that is absent is skipped by name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ring_la

SHAPES = "1x32768x32x128,1x32768x8x128,4x4096x16x64"
LIMIT = 2e-2
Op = Callable[..., Tensor]


def ours(name: str) -> Op:
    return lambda *x: getattr(ring_la, name)(*x).o


def peers() -> dict[str, Op]:
    """FLA's functions by our names, or nothing where it is not installed."""
    try:
        import fla.ops.common.chunk_o as chunk_o
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.retention import chunk_retention
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as e:
        print(f"fla-core: skipped ({e})", file=sys.stderr)
        return {}
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return {
        "linear_attention": lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0],
        "retention": lambda q, k, v: chunk_retention(q, k, v)[0],
        "simple_gla": lambda q, k, v, g: chunk_simple_gla(q, k, v, g=g)[0],
        "gla": lambda q, k, v, g: chunk_gla(q, k, v, g)[0],
        "delta_rule": lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0],
        "gated_delta_rule": lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta)[0],
        "kda": lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta)[0],
    }


OPS = {
    "linear_attention": (), "retention": (), "simple_gla": ("scalar",), "gla": ("diagonal",), "delta_rule": ("beta",),
    "gated_delta_rule": ("scalar", "beta"), "kda": ("diagonal", "beta"),
}  # fmt: skip


def inputs(name: str, B: int, T: int, H: int, D: int) -> list[Tensor]:
    """q, k of unit length, gates logsigmoid(x + 3), β sigmoid(x), x normal; bf16 but for a scalar gate."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (normalize(normal(B, T, H, D), dim=-1).bfloat16() for _ in range(2))
    extra = {
        "scalar": lambda: logsigmoid(normal(B, T, H) + 3),
        "diagonal": lambda: logsigmoid(normal(B, T, H, D) + 3).bfloat16(),
        "beta": lambda: torch.sigmoid(normal(B, T, H)).bfloat16(),
    }
    v = normal(B, T, H, D).bfloat16()
    return [x.requires_grad_() for x in (q, k, v, *(extra[e]() for e in OPS[name]))]


def results(op: Op, x: list[Tensor], do: Tensor) -> list[Tensor]:
    """The output and the gradients of every input."""
    o = op(*x)
    return [o.detach(), *torch.autograd.grad(o, x, do.to(o.dtype))]


def errors(op: Op, x: list[Tensor], do: Tensor, true: list[Tensor]) -> dict[str, float]:
    names = ["o", "dq", "dk", "dv", *(f"d{i}" for i in range(3, len(x)))]
    got = results(op, x, do)
    return {n: float(f"{((g.double() - t).norm() / t.norm()).item():.2e}") for n, g, t in zip(names, got, true)}


def milliseconds(step: Callable[[], Any], budget: float = 0.25) -> float:
    """Median time of a call among calls issued without waiting, so that the host's time shows only where it is the
    bound."""
    step()
    torch.cuda.synchronize()
    start = time.time()
    step()
    torch.cuda.synchronize()
    count = max(8, min(40, int(budget / (time.time() - start))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), 4)


def measure(op: Op, x: list[Tensor]) -> dict[str, float]:
    """Forward alone (no gradient), forward and backward, the host's time of a forward call, peak memory."""
    do = torch.randn_like(x[2])

    def forward() -> None:
        with torch.no_grad():
            op(*x)

    def both() -> None:
        torch.autograd.grad(op(*x), x, do)

    row = {"fwd": milliseconds(forward), "fwd_bwd": milliseconds(both)}
    host = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward()
        host.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    return row | {"host_us": round(statistics.median(host) * 1e6, 1), "peak_gib": round(peak, 3)}


def floor(name: str, shape: tuple[int, ...], bandwidth: float) -> float:
    """ms to move each tensor of forward and backward once (q, k, v, o; then q, k, v, do, dq, dk, dv; gates
    likewise)."""
    B, T, H, D = shape
    tensors = 11 + (3 if "diagonal" in OPS[name] else 0)
    return round(B * T * H * D * 2 * tensors / bandwidth * 1e3, 4)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(0, 255)
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x)) / 1e3)


def measure_all(names: list[str], shapes: list[tuple[int, ...]], budget: float) -> dict[str, Any]:
    start, theirs, speed = time.time(), peers(), bandwidth()
    rows = []
    for shape in shapes:
        for name in names:
            torch.cuda.empty_cache()
            if time.time() - start > budget:
                print(f"{name} {shape}: no time left", flush=True)
                continue
            rows.append(row_of(name, shape, theirs, speed))
            print(line(rows[-1]), flush=True)
    return {"machine": machine(), "copy_bytes_per_second": speed, "rows": rows}


def row_of(name: str, shape: tuple[int, ...], theirs: dict[str, Op], speed: float) -> dict[str, Any]:
    small = inputs(name, 1, 1024, 4, shape[3])
    do = torch.randn_like(small[2])
    wide = [t.detach().double().requires_grad_() for t in small]
    true = results(lambda *t: getattr(ring_la, name)(*t, backend="torch").o, wide, do.double())
    row: dict[str, Any] = {"op": name, "shape": shape, "floor_ms": floor(name, shape, speed)}
    for who, op in (("ring_la", ours(name)), ("fla", theirs.get(name))):
        if op is None:
            continue
        try:
            row[who] = {"errors": errors(op, small, do, true)}
            if max(row[who]["errors"].values()) < LIMIT and all(map(math.isfinite, row[who]["errors"].values())):
                row[who] |= measure(op, inputs(name, *shape))
        except Exception as e:  # one op's failure must not hide the others' figures
            row[who] = row.get(who, {}) | {"failed": f"{type(e).__name__}: {str(e)[-300:]}"}
    return row


def warm(names: list[str], shapes: str, seconds: float) -> None:
    """Compile, and let the peer tune itself, in one process an op, all at once; caches on disk keep both for the
    run."""
    command = [sys.executable, "-m", "ring_la", "bench", "ops", "--shapes", shapes, "--only-warm", "--ops"]
    started = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
    deadline = time.time() + seconds
    for name, process in zip(names, started):
        try:
            process.wait(max(0.0, deadline - time.time()))
        except subprocess.TimeoutExpired:
            print(f"{name}: not all was compiled within {seconds:.0f} s", flush=True)
            process.kill()


def call_once(name: str, shapes: list[tuple[int, ...]]) -> None:
    """One forward and backward of both sides at every shape."""
    for shape in shapes:
        x = inputs(name, *shape)
        for op in (ours(name), peers().get(name)):
            if op is not None:
                results(op, x, torch.randn_like(x[2]))
        torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    mine, peer = row.get("ring_la", {}), row.get("fla", {})

    def side(x: dict[str, Any]) -> str:
        if "fwd" not in x:
            return x.get("failed", f"errors {x.get('errors')}")[:120]
        worst = max(x["errors"].values())
        return f"{x['fwd']:.3f}/{x['fwd_bwd']:.3f} ms host {x['host_us']:.0f}us {x['peak_gib']:.2f}GiB err {worst:.1e}"

    both = "fwd" in mine and "fwd" in peer
    ratio = f"x{peer['fwd'] / mine['fwd']:.2f}/x{peer['fwd_bwd'] / mine['fwd_bwd']:.2f}" if both else "-"
    times = f"{mine['fwd_bwd'] / row['floor_ms']:.1f} floors" if "fwd" in mine else ""
    where = f"{row['op']:17s} {'x'.join(map(str, row['shape'])):16s}"
    return f"{where} {ratio:12s} ours {side(mine)} {times} | fla {side(peer)}"


def machine() -> dict[str, str]:
    import triton

    try:
        from importlib.metadata import version

        fla = version("fla-core")
    except Exception:
        fla = "absent"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "fla-core": fla,
        "commit": commit,
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--shapes", default=SHAPES, help="BxTxHxD, comma-separated")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no op is started")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--warm", type=float, metavar="SECONDS", help="first compile all ops in parallel, so long")
    parser.add_argument("--only-warm", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    names = args.ops.split(",")
    if args.only_warm:
        return call_once(names[0], shapes)
    if args.warm:
        warm(names, args.shapes, args.warm)
    found = measure_all(names, shapes, args.budget)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    from .main import main

    sys.exit(main(["bench", "ops", *sys.argv[1:]]))
