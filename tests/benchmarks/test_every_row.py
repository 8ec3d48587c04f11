"""Rows that GPUs are for: each is a command that its benchmark knows, and ends with all its ranks."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import every_row
from benchmarks.every_row import TABLE, Row, Run, rows, words


class Parsed(Exception):
    """A command line was understood."""


@pytest.mark.parametrize("row", rows(TABLE.read_text()), ids=lambda row: row.name)
def test_a_row_is_known_to_its_benchmark(row, monkeypatch, tmp_path):
    def understood(self, *args, **keywords):
        known(self, *args, **keywords)
        raise Parsed

    line = words(row, 4, tmp_path)
    module, *options = line[line.index("-m", line.index("-m") + 1 if not row.large else 0) + 1 :]
    known = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understood)
    monkeypatch.setattr(sys, "argv", [module, *options])
    main = importlib.import_module("ring_la.cli.main" if module == "ring_la" else module).main
    with pytest.raises(Parsed):
        main()


@pytest.fixture
def python(monkeypatch):
    """Rows are scripts of Python, as they are, and no ranks."""
    monkeypatch.setattr(every_row, "words", lambda row, gpus, out: [sys.executable, "-c", row.command])


HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_row_that_hangs_is_ended_with_what_it_started(python, tmp_path):
    run, start = Run(2, 60, tmp_path), time.monotonic()
    run.one_by_one([Row("hangs", HANGING, 2), Row("behind", "print(7)", 20)])
    assert time.monotonic() - start < 30
    child = int((tmp_path / "hangs.log").read_text())
    killed = time.monotonic()
    while not _ended(child):  # a signal that was sent arrives when the machine gets to it
        assert time.monotonic() - killed < 20
        time.sleep(0.01)
    assert (tmp_path / "behind.log").read_text() == "7\n"
    assert run.ended_well() == {"behind"}
    assert [line.rpartition(" after ")[0] for line in (tmp_path / "ended.txt").read_text().splitlines()] == [
        "hangs cut off",
        "behind exit 0",
    ]


def _ended(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_rows_of_one_gpu_go_side_by_side(python, tmp_path):
    run = Run(2, 60, tmp_path)
    told = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    run.side_by_side([Row(name, told, 20, alone=True) for name in ("a", "b", "c")])
    assert [(tmp_path / f"{name}.log").read_text().strip() for name in ("a", "b", "c")] == ["0", "1", "0"]


def test_nothing_begins_behind_the_budget_and_what_is_done_is_left_alone(python, tmp_path, monkeypatch, capsys):
    Run(1, 5, tmp_path).one_by_one([Row("later", "print(1)", 60)])
    assert "later not begun: the budget" in (tmp_path / "ended.txt").read_text()
    (tmp_path / "ended.txt").write_text("long exit 0 after 9 s\nsparse exit 1 after 9 s\n")
    monkeypatch.setattr(
        sys, "argv", ["every_row", "--gpus", "2", "--list", "--only", "long", "sparse", "--out", os.fspath(tmp_path)]
    )
    capsys.readouterr()
    every_row.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sparse"]
