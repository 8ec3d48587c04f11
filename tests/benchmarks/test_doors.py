"""Every benchmark of `ring-la bench` is also a module to run, and runs itself."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest
import torch

import benchmarks
from ring_la.cli import main

BENCHES = sorted(f.parent.name for f in Path(benchmarks.__file__).parent.glob("*/bench.py"))


@pytest.mark.parametrize("name", BENCHES)
def test_a_module_runs_the_bench_of_its_name(name, monkeypatch):
    said = []
    monkeypatch.setattr(main, "main", said.append)
    monkeypatch.setattr("sys.argv", ["-m", "--out", "x"])
    with pytest.raises(SystemExit):
        runpy.run_module(f"benchmarks.{name}")
    assert said == [["bench", name, "--out", "x"]]
    assert ("bench", name) in main.COMMANDS


GPUS = [
    "attention.kernels",
    "chosen",
    "decode",
    "fused",
    "host",
    "host_parts",
    "latents",
    "ops.bound",
    "scan.profile",
]
GPUS += ["scan.warm_fla", "serving", "sparse", "steps", "symmetric"]
TUNING = {f.stem: f.read_text() for f in sorted((Path(benchmarks.__file__).parent / "tuning").glob("*.py"))}
GPUS += [f"tuning.{name}" for name, text in TUNING.items() if "need_gpus(" in text]
SILENT = "scan.warm_fla", *(f"tuning.{name}" for name, text in TUNING.items() if '"--out"' not in text)
"""Those that write no file."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("name", GPUS)
def test_what_needs_a_gpu_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *([] if name in SILENT else ["--out", "x"])])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "device: expected a CUDA device, got none" in capsys.readouterr().err
