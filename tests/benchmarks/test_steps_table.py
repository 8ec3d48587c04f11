"""Rows of whole steps: which are run, and what the table says of those that are there."""

from __future__ import annotations

import json
import sys

from benchmarks import steps_table
from benchmarks.steps import parted

FOUND = {"eager": 12.0, "kernels of eager": 10.0, "captured": 10.4, "compiled": 11.0, "kernels of compiled": 8.0}


def test_rows_that_are_there_are_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []

    def run(row, gpus, out, seconds):
        ran.append(row.name)
        out.write_text(json.dumps(FOUND | {"compiled, captured": "UnsupportedError: step"}))

    monkeypatch.setattr(steps_table, "run", run)
    monkeypatch.setattr(sys, "argv", ["steps_table", "--out", str(tmp_path), "--rows", "decode-1", "wan-480p"])
    steps_table.main()
    steps_table.main()
    assert ran == ["decode-1", "wan-480p"]
    assert "| decode-1 | 12 (1.200) | 10.4 (1.040) | 11 (1.375) | refused |" in capsys.readouterr().out


def test_a_way_stands_beside_its_own_kernels():
    found = FOUND | {"kernels of captured": 10.2}
    assert steps_table.line("small-4096", found) == "| small-4096 | 12 (1.200) | 10.4 (1.020) | 11 (1.375) | – |"


def test_runs_of_one_process_are_parted():
    assert parted(["--case", "small", "+", "--case", "wan", "--limit", "9"]) == [
        ["--case", "small"],
        ["--case", "wan", "--limit", "9"],
    ]


def test_nothing_is_begun_that_has_no_time(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(steps_table, "run", lambda row, *rest: ran.append(row.name))
    monkeypatch.setattr(sys, "argv", ["steps_table", "--out", str(tmp_path), "--budget", "30"])
    steps_table.main()
    assert ran == []


def test_options_are_those_of_steps():
    """Each row names a case that there is."""
    for row in steps_table.ROWS:
        words = row.options.split()
        assert words[0] == "--case"
        assert words[1] in ("small", "hybrid_1b", "qwen3_next", "decode", "flux", "wan")
