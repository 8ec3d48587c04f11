"""Every benchmark of `ring-la bench` is also a module to run, and runs itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
