"""``ring-la bench large``: its options are those jsonargparse reads, and a run keeps what the plan is compared with."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import script
from benchmarks.large import bench, report
from ring_la.errors import ArgumentError


def options(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.mark.parametrize("shape", bench.SHAPES)
def test_options_are_read_as_jsonargparse_reads_them(shape):
    jsonargparse = pytest.importorskip("jsonargparse")
    train = script.load()
    words = [*bench.SHAPES[shape], "--optimizer.lr=1e-3", "--memory.offload", "2", "--parallel.head_groups", "2"]
    words += bench.TINY[-1:]
    ours = asdict(script.config(train, words))
    if shape.startswith("moe"):
        words.pop()  # an option of a layer it has not
        ours["model"]["options"] = {}
    assert ours == asdict(jsonargparse.auto_cli(train.Config, args=words, as_positional=False))


def test_options_that_do_not_exist_are_refused():
    train = script.load()
    for words, message in ((["--memory.of", "2"], "--memory: expected options"), (["--a.b", "1"], "expected parts")):
        with pytest.raises(ArgumentError, match=message):
            script.config(train, words)
    with pytest.raises(ArgumentError, match="--layers: expected a multiple of 4, got 3"):
        bench.run(options("hybrid_1b", "--layers", 3))


def train(rank: int, folder: str) -> set[torch.dtype]:
    """In the pool: the dtypes of a run's weights."""
    more = ("--documents", "balanced", "--more", "--memory.parameters=bfloat16", "--memory.offload", "1")
    more += (
        "--data.sequences=1",
        "--parallel.layout=balanced",
        "--parallel.attention=ulysses",
        "--parallel.head_groups=auto",
    )
    args = options("hybrid_8b", "--tiny", "--layers", 8, "--length", 96, "--steps", 1, "--folder", folder, *more)
    trainer = bench.on_rank(args, torch.device("cpu"))
    assert len(trainer.model.blocks) == 8
    return {p.dtype for p in trainer.model.parameters()}


def test_a_run_leaves_its_steps_and_what_it_is_about(ranks, tmp_path):
    assert ranks.run(4, train, str(tmp_path)) == [{torch.bfloat16}] * 4
    folder, out = tmp_path / "hybrid_8b", tmp_path / "out.json"
    args = options("hybrid_8b", "--folder", tmp_path, "--out", out)
    assert bench.keep(args, "stopped", 0) == 1
    found = json.loads(out.read_text())
    assert found["outcome"] == "stopped"
    assert f"--folder {tmp_path.name}" in found["command"], "no place of this machine"
    assert str(tmp_path) not in found["command"]
    about = json.loads((folder / "about.json").read_text())
    assert (about["memory"]["offload"], about["documents"]) == (1, "balanced")
    steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert [report.line(step).split()[:2] for step in steps] == [["step", "1:"]]


def test_the_plan_of_a_shape_is_that_of_the_command():
    train = script.load()
    config = script.config(train, [*bench.SHAPES["hybrid_1b"], "--data.seq_len=262144"])

    class Ranks:
        """Axes of one rank."""

        @staticmethod
        def size(axis: int = 0) -> int:
            return 1

    class Mesh:
        axes = Ranks

    said = report.planned(config, "H200", Mesh)
    assert said["seconds"] == pytest.approx(10.8, abs=0.1)
    assert said["gib"] == pytest.approx(80.3, abs=0.5)
