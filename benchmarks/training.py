"""Long sequences trained on GPUs, by examples/train_hybrid.py itself.

    python -m benchmarks.training --gpus 4 --out train-h200x4.json hybrid_1b linear_1b small

    python -m benchmarks.training --plot loss.png "1 rank=one.json" "4 ranks=four.json"    # "small", overlaid

A part is a configuration of examples/configs with a time limit; all run under one torchrun. What they logged is written
after each step, also of one that failed or ran out of time, after which the next do not run. It says every few seconds
where it is; a run without a new step for STALL seconds leaves the stacks of all threads of all ranks in "tail". The
parts on 1 GPU are shorter (see SHORT): they have the tokens a rank of the whole. With `--more --run.profile 1
--run.steps 3` the third step's kernels are summed up as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from . import ROOT, environment, torchrun
from .rows import save
from .script import config, load

PARTS = {
    "hybrid_1b": (["--config", "examples/configs/hybrid_1b.yaml"], 150),
    "linear_1b": (["--config", "examples/configs/linear_1b.yaml"], 110),
    "small": (
        ["--config=examples/configs/small.yaml", "--memory.dtype=bfloat16", "--run.save_every=0", "--run.steps=300"],
        70,
    ),
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
    parser.add_argument("--limit", type=float, help="seconds all parts may take, instead of their own limits")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of every part, last")
    parser.add_argument("--plot", help="draw the losses of part small in NAME=FILE …, given instead of parts")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        named = (part.split("=", 1) for part in args.parts)
        overlay(Path(args.plot), {name: json.loads(Path(file).read_text())["small"] for name, file in named})
        return
    if args.inside:
        inside(json.loads(Path(args.inside).read_text()))
        return
    names = args.parts or list(PARTS)
    limit = args.limit or sum(PARTS[name][1] for name in names)
    options = {name: options_of(name, args.gpus) + args.more for name in names}
    results = run(options, args.gpus, limit, lambda found: save(args.out, found))
    for name, result in results.items():
        steps = result["steps"]
        last = steps[-1] if steps else result["tail"][-3000:]
        print(f"{name}: {result['outcome']}, {result['seconds']:.0f} s", last)
        for start in result["starts"]:
            print("  before the first step:", {part: round(s, 1) for part, s in start["seconds"].items()})
        for kernel, calls, ms in result.get("kernels", [])[:25]:
            print(f"  {ms:9.1f} ms {calls:6d} × {kernel[:100]}")


def options_of(name: str, gpus: int) -> list[str]:
    """The command line of a part."""
    return PARTS[name][0] + (SHORT[name] if gpus == 1 else [])


def run(options: dict[str, list[str]], gpus: int, limit: float, keep: Callable[[dict[str, dict]], None]) -> dict:
    """Parts by name, one after the other under one torchrun: they share its start. What each logged is kept after
    each step; last how it ended, and the output if that was not well."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in options}
        todo, log, start = Path(folder) / "todo.json", Path(folder) / "log.txt", time.monotonic()
        todo.write_text(json.dumps([[*x, "--run.folder", str(folders[name])] for name, x in options.items()]))

        def results(outcome: str, tail: str = "") -> dict[str, dict]:
            shared = {"gpus": gpus, "outcome": outcome, "seconds": time.monotonic() - start, "tail": tail}
            lines = {n: {f: logged(path / f"{f}.jsonl") for f in ("starts", "metrics")} for n, path in folders.items()}
            return {
                n: {"options": options[n], **shared, "starts": x["starts"], "steps": x["metrics"]}
                for n, x in lines.items()
            }

        command = torchrun(gpus, "benchmarks.training", "--inside", str(todo))
        watched = environment(PYTHONFAULTHANDLER="1")  # SIGABRT leaves the stacks
        with open(log, "w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=watched)
            outcome = watch(
                process, [f / "metrics.jsonl" for f in folders.values()], limit, lambda: keep(results("under way"))
            )
        found = results(outcome, log.read_text()[-30000:] if outcome != "exit 0" else "")
        for name, path in folders.items():
            found[name] |= kernels(path / "profile" / "rank-0.json")
        keep(found)
        return found


def inside(todo: list[list[str]]) -> None:
    """On each rank: the script's runs with these command lines."""
    script = load()
    import torch

    start = script.Start()
    start.part("imports")
    device = script.join(timedelta(seconds=STALL))
    start.part("process group")
    for arguments in todo:
        script.Trainer(config(script, arguments), device, start).train()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            print(f"left: {torch.cuda.memory_allocated() / 2**30:.2f} GiB", flush=True)
        start = script.Start(time.time())
    torch.distributed.destroy_process_group()


def watch(
    process: subprocess.Popen, metrics: list[Path], limit: float, moving: Callable[[], None], stall: float = STALL
) -> str:
    """How torchrun ended; `moving` is called after each step. It is stopped after `limit` seconds, and after `stall` of
    them without a step."""
    start = moved = said = time.monotonic()
    steps = 0
    while process.poll() is None:
        time.sleep(0.2)
        now, found = time.monotonic(), sum(len(logged(file)) for file in metrics)
        if found > steps:
            steps, moved = found, now
            moving()
        if now - said > 5:
            said = now
            print(f"{now - start:.0f} s, {steps} steps", flush=True)
        if now - start > limit or now - moved > stall:
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
