"""Every operator on one GPU against its peers in one run: errors first, then times, memory and the host's share.

    ring-la bench ops [--rows kimi,qwen:x16:32x] [--rivals flash_qla,fla,cudnn] [--limit SECONDS] [--ops gla,kda]
                      [--shapes 1x32768x32x128,…] [--tune SECONDS] [--out FILE.json] [--png FILE.png]

What is trained and served comes first (`production`): --rows says which of it, --rivals beside whom, and no part of it
starts a row after --limit seconds. With --rows alone nothing else is measured, with --ops or --shapes alone none of it.

Peers: fla-core, mamba_ssm, causal_conv1d; those not installed are skipped by name. FLA is tuned first (see
`peers/fla_tuning.py`), for at most --tune seconds; --configs N: its kernels choose among N configurations. Each side of
an operator is a process of its own. They compile side by side for at most --warm seconds and compare themselves with
fp64; then one after the other is timed alone, but for a side whose error is off. Times are medians of CUDA events;
memory is the peak beyond the inputs; the host's time is that of a forward call without and with gradients, and of the
replay of one as a CUDA graph. --cold measures the first forward and backward with empty caches, all sides at once; a
peer's goes on while the others compile, and is stopped before anything is timed. FLA's guard against the gated backward
on this Triton (#640) is switched off; its errors are checked like all others. --docs writes the tables into a Markdown
file (see `tables`), and --read does that with an earlier run's figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ring_la.cli.options import count
from ring_la.errors import ArgumentError

from .. import ROOT, environment
from ..options import earlier
from ..peers import fla_tuning
from ..peers.ops import RIVALS, peers_of, versions
from ..rows import machine, save
from . import production, report, tables
from .cases import CASES, SHARED_INPUTS, Shape
from .measure import bandwidth

SHAPES = {"cuda": "1x32768x32x128,1x32768x8x128,1x8192x32x128,4x4096x16x64", "cpu": "1x128x2x16"}
STEPS = {"cuda": "64x1x32x128", "cpu": "4x1x2x16"}
MAMBA = {"cuda": "1x32768x80x128x64", "cpu": "1x128x2x16x8"}
LATE = "not ready in time"
ALONE = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0"}
"""fla-core calls no other peer."""
LIMIT, SHARED = 2e-2, 0.1
"""Errors beyond which a side is not timed: of the output or a gradient, and of the gradient of what all tokens share,
a sum in which most cancels."""


class Worker:
    """A process with one side of one operator (see `worker`)."""

    def __init__(self, name: str, side: str, shapes: list[str], env: dict[str, str] | None = None) -> None:
        self.name, self.side, self.shapes = name, side, shapes
        command = [sys.executable, "-m", "benchmarks.ops.worker", name, side, ",".join(shapes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(**fla_tuning.ENVIRONMENT, **ALONE, OMP_NUM_THREADS="1") | (env or {}),
        )  # fmt: skip
        self.began: dict[str, float] = {}
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    def _listen(self) -> None:
        for text in self.process.stdout:
            if text.startswith("{"):
                self.lines.put(text)
        self.lines.put(None)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next object it prints; what went wrong if none comes in time, and the process is then stopped."""
        try:
            text = self.lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.stop()
            return {"failed": LATE}
        if text is None:
            self.process.wait()
            return {"failed": f"ended with {self.process.returncode}: {''.join(self.said[-2:])[-200:]}"}
        return json.loads(text)

    def ready(self, deadline: float) -> dict[str, dict[str, Any]]:
        """What it says of each shape before it can be measured."""
        said = self.answer(deadline - time.monotonic())  # of its first call
        self.began = {"first_s": said["first_s"]} if "first_s" in said else {}
        gone = self.process.poll() is not None
        return {shape: said if gone else self.answer(deadline - time.monotonic()) for shape in self.shapes}

    def measure(self, shape: str, seconds: float) -> dict[str, Any]:
        try:
            self.process.stdin.write(f"measure {shape}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"failed": "it had ended"}
        return self.answer(seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Part(NamedTuple):
    """Rows that have their seconds together."""

    name: str
    rows: list[tuple[str, str]]


def parts_of(args: argparse.Namespace, names: list[str], shapes: list[str], device: str) -> list[Part]:
    """(operator, shape) part by part, production rows first."""
    rest = args.ops is not None or args.shapes is not None
    found = []
    if args.rows is not None or not rest:
        by_part: dict[str, list[tuple[str, str]]] = {}
        for row in production.chosen(args.rows or ",".join(production.PARTS), device):
            by_part.setdefault(row.part, []).append((row.op, row.shape))
        found = [Part(*part) for part in by_part.items()]
    return [*found, Part("operators", plan(names, shapes, device))] if rest or args.rows is None else found


def plan(names: Sequence[str], shapes: list[str], device: str) -> list[tuple[str, str]]:
    """(operator, shape), shape by shape; Mamba-2 and the steps, which have shapes of their own, after the first."""
    own = {n: STEPS[device] for n in names if CASES[n].step} | {"mamba2": MAMBA[device]}
    common = [[(n, s) for n in names if n not in own] for s in shapes]
    return [*common[0], *[(n, own[n]) for n in names if n in own], *itertools.chain(*common[1:])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", metavar="PART[:SHAPE],…", help=f"production rows, out of {', '.join(production.PARTS)}"
    )
    parser.add_argument("--rivals", default=",".join(RIVALS), help="peers, comma-separated (default: all)")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="no row of a production part starts after this"
    )
    parser.add_argument("--ops", help="comma-separated (default: all)")
    parser.add_argument("--shapes", help="BxTxHxK or BxTxHxKxV, comma-separated")
    parser.add_argument("--tune", type=float, default=300, metavar="SECONDS", help="time to tune fla-core in; 0: don't")
    parser.add_argument(
        "--configs", type=count, metavar="N", help="fla-core's kernels choose among N configurations (default: all)"
    )
    parser.add_argument("--warm", type=float, default=600, metavar="SECONDS", help="time to compile in (default 600)")
    parser.add_argument(
        "--jobs",
        type=count,
        default=min(16, os.cpu_count() or 1),
        help="processes compiling at a time (default: cores, up to 16)",
    )
    parser.add_argument("--row", type=float, default=60, metavar="SECONDS", help="time for one side of a row")
    parser.add_argument(
        "--peer-limit", type=float, default=LIMIT, help=f"errors beyond which a peer is not timed (default {LIMIT})"
    )
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="no row starts after this")
    parser.add_argument("--cold", default="", metavar="OPS", help="operators to start from empty caches first")
    parser.add_argument("--cold-limit", type=float, default=60, metavar="SECONDS", help="for ours, beside its peers")
    parser.add_argument("--out", type=pathlib.Path, help="JSON, written as rows come")
    parser.add_argument("--png", type=pathlib.Path, help="a picture (of the first run read); needs matplotlib")
    parser.add_argument("--docs", type=pathlib.Path, help="a Markdown file whose tables are to be those of --out")
    parser.add_argument(
        "--read", type=pathlib.Path, nargs="+", metavar="FILE", help="measure nothing: the rows of earlier --outs"
    )


def run(args: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.docs and not (args.out or args.read):
        raise ArgumentError("docs", "--out or --read as well, the file that the tables name", "none")
    if args.read:
        runs = [(earlier(file), file) for file in args.read]
    else:
        names, shapes, rivals = _choices(args, device)
        runs = [(measured(args, parts_of(args, names, shapes, device), rivals, device), args.out)]
    for found, _ in runs:
        print(*report.notes(found), sep="\n", flush=True)
    if args.png:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        report.picture(runs[0][0], args.png)
    if args.docs:
        tables.write(runs, args.docs)
    return int(any("fwd" not in row["sides"]["ring_la"] for found, _ in runs for row in found["rows"]))


def measured(args: argparse.Namespace, parts: list[Part], rivals: list[str], device: str) -> dict[str, Any]:
    """All rows, kept in --out as they come."""
    if args.configs:
        os.environ[fla_tuning.FEW] = str(args.configs)
    started, rows_planned = time.monotonic(), [row for part in parts for row in part.rows]
    absent: dict[str, dict[str, str]] = {}
    sides = {}
    for name in dict.fromkeys(name for name, _ in rows_planned):
        sides[name], absent[name] = peers_of(name, device, rivals)
    missing = {peer: why for peers in absent.values() for peer, why in peers.items()}
    found: dict[str, Any] = {"machine": facts(), "absent": missing, "rows": []}
    if args.configs:
        found["fla_configurations"] = args.configs
    cold_ops = args.cold.split(",") if args.cold else []
    cold = ColdStart(cold_ops, sides, {name: next(s for n, s in rows_planned if n == name) for name in cold_ops})
    cold.wait(args.cold_limit)
    theirs = [row for part in parts if part.name == "operators" for row in part.rows if "fla" in sides[row[0]]]
    if theirs and args.tune:
        found["tuning"] = fla_tuning.tune(theirs, args.tune, args.jobs)
        print(f"tuning fla-core: {json.dumps(found['tuning'])}", flush=True)
    workers, ready = prepare(rows_planned, sides, args.jobs, time.monotonic() + args.warm)
    found["warm_s"] = round(time.monotonic() - started, 1)
    found["cold"] = cold.finish()
    found["copy_bytes_per_second"] = bandwidth(device)
    for part in parts:
        began = time.monotonic()
        for name, shape in part.rows:
            late = part.name != "operators" and time.monotonic() - began > args.limit
            if late or time.monotonic() - started > args.budget:
                print(f"{name} {shape}: no time left", flush=True)
                continue
            row: dict[str, Any] = {"op": name, "shape": shape, "sides": {}}
            row |= {} if part.name == "operators" else {"part": part.name}
            for side in ("ring_la", *sides[name]):
                worker = workers[_key(name, side, shape)]
                limit = LIMIT if side == "ring_la" else args.peer_limit
                row["sides"][side] = side_row(worker, ready[_key(name, side, shape)][shape], shape, args.row, limit)
                row["sides"][side] |= worker.began
            if "part" in row:
                row["sides"] |= {peer: {"failed": why} for peer, why in absent[name].items()}
            moved = row["sides"]["ring_la"].get("floor_bytes")
            if moved:
                row["floor_ms"] = round(moved / found["copy_bytes_per_second"] * 1e3, 4)
            found["rows"].append(row)
            print(report.line(row), flush=True)
            save(args.out, found)
    for worker in workers.values():
        worker.stop()
    save(args.out, found)
    return found


def _choices(args: argparse.Namespace, device: str) -> tuple[list[str], list[str], list[str]]:
    names, rivals = (args.ops.split(",") if args.ops else list(CASES)), args.rivals.split(",") if args.rivals else []
    given = (
        ("ops", names, CASES),
        ("cold", args.cold.split(",") if args.cold else [], CASES),
        ("rivals", rivals, RIVALS),
    )
    for option, words, known in given:
        unknown = [n for n in words if n not in known]
        if unknown:
            raise ArgumentError(option, f"names out of {', '.join(known)}", ", ".join(unknown))
    if args.ops is None:
        names = [n for n in names if not CASES[n].gates]  # they have rows of their own
    try:
        shapes = [str(Shape.parse(s)) for s in (args.shapes or SHAPES[device]).split(",")]
    except ValueError:
        raise ArgumentError("shapes", "sizes like 1x32768x32x128, comma-separated", args.shapes) from None
    return names, shapes, rivals


def _key(name: str, side: str, shape: str) -> tuple[str, str, str]:
    """Which worker a row belongs to: ours takes all shapes, a peer has one for each head layout, since it tunes."""
    size = Shape.parse(shape)
    return name, side, "" if side == "ring_la" else f"{size.heads}x{size.K}x{size.V}"


def prepare(
    rows: list[tuple[str, str]], sides: dict[str, list[str]], jobs: int, deadline: float
) -> tuple[dict[tuple[str, str, str], Worker], dict[tuple[str, str, str], dict[str, dict[str, Any]]]]:
    """Workers by their keys, and what each says of its shapes: ours first, at most `jobs` compiling at a time."""
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for name, shape in rows:
        for side in ("ring_la", *sides[name]):
            shapes.setdefault(_key(name, side, shape), []).append(shape)

    def one(key: tuple[str, str, str]) -> tuple[Worker, dict[str, dict[str, Any]]]:
        worker = Worker(key[0], key[1], shapes[key])
        return worker, worker.ready(deadline)

    keys = sorted(shapes, key=lambda key: key[1] != "ring_la")
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(keys, pool.map(one, keys)))
    return {key: worker for key, (worker, _) in found.items()}, {key: said for key, (_, said) in found.items()}


def side_row(worker: Worker, ready: dict[str, Any], shape: str, seconds: float, limit: float = LIMIT) -> dict[str, Any]:
    """Errors, then the times, of a side that is right."""
    errors = ready.get("errors", {"o": math.inf})
    if not all(e < (max(SHARED, limit) if n in SHARED_INPUTS else limit) for n, e in errors.items()):  # NaN is off, too
        return ready
    return {"errors": ready["errors"]} | {k: v for k, v in worker.measure(shape, seconds).items() if k != "row"}


CACHES = "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"
"""Where Triton and ours, and FlashQLA's compiler, keep what they compiled."""


class ColdStart:
    """First forwards and backwards with empty caches of compiled kernels, of these operators, all sides at once."""

    def __init__(self, names: list[str], sides: dict[str, list[str]], shapes: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._began = time.monotonic()
        self._workers: dict[str, dict[str, Worker]] = {}
        self._found: dict[str, dict[str, float | str]] = {}
        for name in names:
            self._workers[name] = {
                side: Worker(name, side, [shapes[name]], dict.fromkeys(CACHES, f"{self._folder.name}/{name}-{side}"))
                for side in ("ring_la", *sides[name])
            }

    def wait(self, limit: float) -> None:
        """Until ours are done, or for so many seconds."""
        for name, workers in self._workers.items():
            self._found[name] = {"ring_la": self._first(workers["ring_la"], self._began + limit - time.monotonic())}
            workers["ring_la"].stop()

    def finish(self) -> dict[str, dict[str, float | str]]:
        """Seconds of each side; what is not done is stopped."""
        for name, workers in self._workers.items():
            for side, worker in workers.items():
                if side not in self._found[name]:
                    self._found[name][side] = self._first(worker, 0.0)
                worker.stop()
            print(f"cold {name}: {self._found[name]}", flush=True)
        self._folder.cleanup()
        return self._found

    def _first(self, worker: Worker, seconds: float) -> float | str:
        said = worker.answer(seconds)
        late = f"not within {time.monotonic() - self._began:.0f} s"
        return said.get("first_s", late if said.get("failed") == LATE else said.get("failed"))


def facts() -> dict[str, str]:
    """What a figure depends on."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True).stdout.split()
    commit = said[1] if said and pathlib.Path(said[0]) == ROOT else "unknown"
    return machine() | {"commit": commit} | versions()
