"""``ring-la plan`` beside every whole model that ran on H200s, as benchmarks/results has it, and what its page says."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import ROOT, script
from benchmarks.large import bench, report
from benchmarks.large.offload import IN_FLIGHT

RESULTS = ROOT / "benchmarks" / "results"
NEAR = 0.1
"""Seconds and GiB of a run beside the plan's."""


class Run(NamedTuple):
    """A run on so many GPUs, one sequence over all of them; `first`: of one step alone."""

    config: Any
    gpus: int
    seconds: float
    gib: float
    first: bool


class Axes:
    """Of a mesh whose ranks all share a sequence."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def size(self, axis: int = 0) -> int:
        return self.gpus


class Mesh(NamedTuple):
    axes: Axes


def large(file: str, tmp_path: Path, part: str = "steps") -> Run:
    """A file of ``ring-la bench large``, or a part of one of ``benchmarks.large.offload``."""
    found, train = json.loads((RESULTS / file).read_text()), script.load()
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args, _ = parser.parse_known_args(found["command"].split())  # options come and go
    words = [*bench.SHAPES[args.shape], f"--data.seq_len={args.length}"]
    if args.shape.startswith("moe"):
        transformers = pytest.importorskip("transformers")
        transformers.Qwen3_5MoeTextConfig(num_hidden_layers=args.layers or 40).save_pretrained(tmp_path)
        words += ["--model.transformers", str(tmp_path)]
    elif args.layers:
        words.append(f"--model.repeat={args.layers // bench.GROUP}")
    config = script.config(train, words)
    config.memory = type(config.memory)(**found["memory"])
    config.optimizer.kind = found["optimizer"]
    if part == "in host memory":
        config.memory.offload = IN_FLIGHT
    return timed(config, int(found["axes"].split()[-1]), found[part])


def trained(file: str, part: str) -> Run:
    """A part of a file of ``python -m benchmarks.training``."""
    found = json.loads((RESULTS / file).read_text())[part]
    return timed(script.config(script.load(), found["options"]), found.get("gpus", 1), found["steps"])


def timed(config: Any, gpus: int, steps: list[dict[str, float]]) -> Run:
    """The fastest step after the first, which compiles, and its peak; of a run of one step, that one."""
    step = min(steps[1:] or steps, key=lambda step: step["seconds"])
    return Run(config, gpus, step["seconds"], step["peak_memory_gib"], len(steps) == 1)


TRAINED = {
    "hybrid_1b, 262,144 tokens on four": ("training-h200x4.json", "hybrid_1b, 262,144 tokens, rates of today"),
    "linear_1b, 4,194,304 tokens": ("training-h200x4.json", "linear_1b"),
    "linear_1b, 131,072 tokens": ("training-profile-h200.json", "now"),
}
LARGE = {
    "hybrid_1b, 1,048,576 tokens, ": "large-hybrid_1b-h200x4.json",
    "hybrid_1b, 262,144 tokens on one": "large-hybrid_1b-h200.json",
    "hybrid_8b, 131,072 tokens on two": "large-hybrid_8b-h200x2.json",
    "hybrid_8b, 262,144 tokens on four": "large-hybrid_8b-h200x4.json",
    "16 layers of Qwen3.5": "large-moe-h200x2.json",
    "12 layers of it, 32,768": "large-moe-norms-h200.json",
    "12 layers of it, by an older code": "large-moe-h200.json",
    "hybrid_1b_mla": "large-hybrid_1b_mla-h200x4.json",
    "hybrid_1b_dsa": "large-hybrid_1b_dsa-h200x4.json",
    "all 40 layers of it": "large-moe_35b_a3b-2-h200x4.json",
}
EARLIER = {"large-moe_35b_a3b-h200x4.json"}
"""Runs of which a later one of the same has a row."""
OFFLOAD = {"12 layers of hybrid_8b": "on the device", "the same, activations in host memory": "in host memory"}
"""What a row of docs/users/guides/planning.md begins with, and its run; of the last, parts of offload-h200.json."""
FARTHER = {"16 layers of Qwen3.5", "12 layers of it, by an older code", "hybrid_1b_dsa", "all 40 layers of it"}
"""Runs that the plan is not near: by an older code, whose optimizer, losses and experts' sums took what the plan leaves
out; one whose one step compiled and allocated, and a mixture on four (the page says what is known of them)."""


def run_of(row: str, tmp_path: Path) -> Run:
    if row in OFFLOAD:
        return large("offload-h200.json", tmp_path, OFFLOAD[row])
    return trained(*TRAINED[row]) if row in TRAINED else large(LARGE[row], tmp_path)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("row", [*TRAINED, *LARGE, *OFFLOAD])
def test_the_plan_is_near_what_ran_and_its_page_says_both(row, tmp_path):
    run = run_of(row, tmp_path)
    said = report.planned(run.config, "H200", Mesh(Axes(run.gpus)))
    gib = said["first_gib" if run.first else "gib"]
    off = [abs(plan / ran - 1) for plan, ran in ((said["seconds"], run.seconds), (gib, run.gib))]
    assert (max(off) > NEAR) == (row in FARTHER), off
    assert max(off) < 0.45
    page = (ROOT / "docs/users/guides/planning.md").read_text()
    (cells,) = re.findall(rf"^\| {re.escape(row)}.*?\|((?: [\d.]+ \|){{4}})$", page, re.MULTILINE)
    numbers = [float(cell) for cell in cells.split("|") if cell.strip()]
    figures = [run.seconds, said["seconds"], run.gib, gib]
    assert numbers == [round(f, 1 if i > 1 or f > 12 else 2) for i, f in enumerate(figures)]


def test_every_file_of_a_large_run_has_a_row():
    assert {*LARGE.values(), *EARLIER} == {file.name for file in RESULTS.glob("large-*.json")}
