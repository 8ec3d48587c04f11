"""Long sequences trained on GPUs, by examples/train_hybrid.py itself.

    python -m tests.gpu.check_training --gpus 4 --out train-h200x4.json hybrid_1b linear_1b small

    python -m tests.gpu.check_training --plot loss.png "1 rank=one.json" "4 ranks=four.json"    # "small", overlaid

A part is a configuration of examples/configs with a time limit; what it logged is written after each step, also of one
that failed or ran out of time. It says every few seconds where it is; a run without a new step for STALL seconds leaves
the stacks of all threads of all ranks in "tail". The parts on 1 GPU are shorter (see SHORT): they have the tokens a
rank of the whole. With `--more --run.profile 1 --run.steps 3` the third step's kernels are summed up as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "hybrid_1b": (["--config", "examples/configs/hybrid_1b.yaml"], 150),
    "linear_1b": (["--config", "examples/configs/linear_1b.yaml"], 110),
    "small": (["--config", "examples/configs/small.yaml", "--memory.dtype", "bfloat16", "--run.save_every", "0"], 70),
}
SHORT = {
    "hybrid_1b": ["--data.seq_len", "262144"],
    "linear_1b": ["--data.seq_len", "262144", "--memory.rounds", "2", "--run.steps", "1"],
    "small": [],
}

STALL = 90.0
"""Seconds without a new step after which a run is taken for stuck: a first step compiles its kernels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of {', '.join(PARTS)}; default: all")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--out", default="train.json")
    parser.add_argument("--limit", type=float, help="seconds a part may take, instead of its own limit")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of every part, last")
    parser.add_argument("--plot", help="draw the losses of part small in NAME=FILE …, given instead of parts")
    args = parser.parse_args()
    if args.plot:
        named = (part.split("=", 1) for part in args.parts)
        overlay(Path(args.plot), {name: json.loads(Path(file).read_text())["small"] for name, file in named})
        return
    results: dict[str, dict] = {}

    def keep(name: str, result: dict) -> None:
        results[name] = result
        Path(args.out).write_text(json.dumps(results, indent=1))

    for name in args.parts or PARTS:
        part(name, args.gpus, args.limit, args.more, partial(keep, name))
    for name, result in results.items():
        steps = result["steps"]
        last = steps[-1] if steps else result["tail"][-3000:]
        print(f"{name}: {result['outcome']}, {result['seconds']:.0f} s", last)
        for start in result["starts"]:
            print("  before the first step:", {part: round(s, 1) for part, s in start["seconds"].items()})
        for kernel, calls, ms in result.get("kernels", [])[:25]:
            print(f"  {ms:9.1f} ms {calls:6d} × {kernel[:100]}")


def part(name: str, gpus: int, limit: float | None, more: list[str], keep: Callable[[dict], None]) -> None:
    """Keep, after each step, what the script logged with this part's options; last how it ended, and its output if
    that was not well."""
    options, seconds = PARTS[name]
    options, seconds = options + (SHORT[name] if gpus == 1 else []) + more, limit or seconds
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
        command += ["examples/train_hybrid.py", *options, "--run.folder", folder]
        start, log, metrics = time.monotonic(), Path(folder) / "log.txt", Path(folder) / "metrics.jsonl"

        def result(outcome: str, tail: str = "") -> dict:
            about = {"options": options, "gpus": gpus, "outcome": outcome, "seconds": time.monotonic() - start}
            return about | {"starts": logged(Path(folder) / "starts.jsonl"), "steps": logged(metrics), "tail": tail}

        environment = os.environ | {"PYTHONFAULTHANDLER": "1"}  # SIGABRT leaves the stacks
        with open(log, "w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment)
            outcome = watch(process, name, metrics, seconds, lambda: keep(result("under way")))
        ended = result(outcome, log.read_text()[-30000:] if outcome != "exit 0" else "")
        keep(ended | kernels(Path(folder) / "profile" / "rank-0.json"))


def watch(process: subprocess.Popen, name: str, metrics: Path, limit: float, moving: Callable[[], None]) -> str:
    """How torchrun ended; `moving` is called after each step. It is stopped after `limit` seconds, and after STALL of
    them without a step."""
    start = moved = said = time.monotonic()
    steps = 0
    while process.poll() is None:
        time.sleep(0.2)
        now, found = time.monotonic(), len(logged(metrics))
        if found > steps:
            steps, moved = found, now
            moving()
        if now - said > 5:
            said = now
            print(f"{name}: {now - start:.0f} s, {steps} steps", flush=True)
        if now - start > limit or now - moved > STALL:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for rank in ranks:
                os.kill(int(rank), signal.SIGABRT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"stopped after {now - start:.0f} s, {now - moved:.0f} s after its last step"
    return f"exit {process.returncode}"


def logged(metrics: Path) -> list[dict]:
    """The lines of a .jsonl, whole ones alone."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kernels(trace: Path, most: int = 60) -> dict:
    """Of a traced step of rank 0: its kernels by name, ``[name, calls, ms]``, and the time with and without any, ms."""
    if not trace.exists():
        return {}
    found: dict[str, list[float]] = {}
    spans = []
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
            entry = found.setdefault(event["name"], [0, 0.0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + event["dur"] / 1e3
    busy = idle = 0.0
    end = min((start for start, _ in spans), default=0.0)
    for start, stop in sorted(spans):
        idle += max(0.0, start - end) / 1e3
        busy += max(0.0, stop - max(start, end)) / 1e3
        end = max(end, stop)
    top = sorted(found.items(), key=lambda item: -item[1][1])[:most]
    return {"busy_ms": busy, "idle_ms": idle, "kernels": [[name[:160], *entry] for name, entry in top]}


def overlay(file: Path, runs: dict[str, dict]) -> None:
    """The runs' losses in one picture, and below it how far each is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained")
    first: list[float] = []
    for i, (name, run) in enumerate(runs.items()):
        losses = [m["loss"] for m in run["steps"]]
        top.plot(losses, label=name, linewidth=3 if i == 0 else 1, alpha=0.4 if i == 0 else 1)
        if i == 0:
            first = losses
            continue
        apart = [abs(a - b) / b for a, b in zip(losses, first)]
        bottom.semilogy(apart, linewidth=0.8, color=f"C{i}")
        average = sum(apart) / len(apart)
        print(f"{name}: {len(apart)} steps, relative difference at most {max(apart):.1e}, on average {average:.1e}")
    top.set(ylabel="cross-entropy (nats a byte)", title="The same training, its sequences whole and split")
    top.legend()
    bottom.set(xlabel="step", ylabel="relative\ndifference")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
