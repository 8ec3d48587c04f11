"""Long sequences trained on GPUs, by examples/train_hybrid.py itself.

    python -m tests.gpu.check_training --gpus 4 --out train-h200x4.json hybrid_1b linear_1b small

    python -m tests.gpu.check_training --plot loss.png one.json four.json       # the losses of "small", overlaid

A part is a configuration of examples/configs with a time limit; what it logged is written after each part, also of one
that failed or ran out of time. The parts on 1 GPU are shorter (see SHORT): they have the tokens a rank of the whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "hybrid_1b": (["--config", "examples/configs/hybrid_1b.yaml"], 110),
    "linear_1b": (["--config", "examples/configs/linear_1b.yaml"], 110),
    "small": (["--config", "examples/configs/small.yaml", "--memory.dtype", "bfloat16", "--run.save_every", "0"], 70),
}
SHORT = {
    "hybrid_1b": ["--data.seq_len", "262144"],
    "linear_1b": ["--data.seq_len", "262144", "--memory.rounds", "2", "--run.steps", "1"],
    "small": [],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of {', '.join(PARTS)}; default: all")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--out", default="train.json")
    parser.add_argument("--limit", type=float, help="seconds a part may take, instead of its own limit")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of every part, last")
    parser.add_argument("--plot", help="draw the losses of part small in the files given instead of parts")
    args = parser.parse_args()
    if args.plot:
        overlay(Path(args.plot), [json.loads(Path(file).read_text())["small"] for file in args.parts])
        return
    results = {}
    for name in args.parts or PARTS:
        results[name] = part(name, args.gpus, args.limit, args.more)
        Path(args.out).write_text(json.dumps(results, indent=1))
    for name, result in results.items():
        steps = result["steps"]
        print(f"{name}: {result['outcome']}, {result['seconds']:.0f} s", steps[-1] if steps else result["tail"])


def part(name: str, gpus: int, limit: float | None, more: list[str]) -> dict:
    options, seconds = PARTS[name]
    options = options + (SHORT[name] if gpus == 1 else []) + more
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
        command += ["examples/train_hybrid.py", *options, "--run.folder", folder]
        start, log = time.monotonic(), Path(folder) / "log.txt"
        with open(log, "w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            try:
                outcome = f"exit {process.wait(limit or seconds)}"
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                outcome = f"stopped after {limit or seconds:.0f} s"
        took, metrics = time.monotonic() - start, Path(folder) / "metrics.jsonl"
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        tail = log.read_text()[-3000:] if outcome != "exit 0" else ""
        return {"options": options, "gpus": gpus, "outcome": outcome, "seconds": took, "steps": steps, "tail": tail}


def overlay(file: Path, runs: list[dict]) -> None:
    """The runs' losses in one picture, and below it how far each is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained")
    first = [m["loss"] for m in runs[0]["steps"]]
    for i, run in enumerate(runs):
        losses = [m["loss"] for m in run["steps"]]
        name = f"{run['gpus']} rank" + "s" * (run["gpus"] > 1)
        top.plot(losses, label=name, linewidth=3 if i == 0 else 1, alpha=0.4 if i == 0 else 1)
        if i:
            apart = [abs(a - b) / b for a, b in zip(losses, first)]
            bottom.semilogy(apart, linewidth=0.8, color=f"C{i}")
            print(f"{name}: {len(apart)} steps, relative difference at most {max(apart):.1e}, last {apart[-1]:.1e}")
    top.set(ylabel="cross-entropy (nats a byte)", title="The same training, its sequences whole and split")
    top.legend()
    bottom.set(xlabel="step", ylabel="relative\ndifference")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
