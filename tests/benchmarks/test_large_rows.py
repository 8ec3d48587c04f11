"""``benchmarks.large.rows``: a row that fails or takes too long is not the end of those behind it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.large import bench, rows


def row(folder: Path, *words: str) -> argparse.Namespace:
    made = rows.parsed(" ".join(["hybrid_1b", *words]), folder)
    bench.folder_of(made).mkdir(parents=True)
    return made


@pytest.fixture
def process():
    """A process that would stay, of a session of its own, with one child."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    made = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield made
    rows.end(made)


def test_how_a_row_ended(process, tmp_path):
    later = time.monotonic() + 60
    done, failed, slow = (row(tmp_path / name, "--limit", "1") for name in ("done", "failed", "slow"))
    done.out = tmp_path / "done.json"
    (bench.folder_of(done) / "metrics.jsonl").write_text(json.dumps({"step": 1, "seconds": 2.0, "loss": 3.0}) + "\n")
    (bench.folder_of(done) / rows.DONE).touch()
    (bench.folder_of(failed) / f"{rows.FAILED}-1").write_text("Traceback\n  here\nOutOfMemoryError: 2 GiB\n")
    assert rows.watched(done, process, later) == "exit 0"
    found = json.loads(done.out.read_text())
    assert (found["outcome"], len(found["steps"])) == ("exit 0", 1)
    assert rows.watched(failed, process, later) == "OutOfMemoryError: 2 GiB"
    assert rows.watched(slow, process, later).startswith("stopped after 1 s")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text().split():
        assert time.monotonic() < later
        time.sleep(0.05)
    child = children.read_text().split()[0]
    rows.end(process)
    assert rows.watched(slow, process, later) == "ranks ended, exit -9"
    assert not Path("/proc", child).exists() or Path("/proc", child, "stat").read_text().split()[2] == "Z"


def test_rows_behind_one_that_failed_go_on_in_new_ranks(monkeypatch, tmp_path):
    given = [row(tmp_path / str(n)) for n in range(4)]
    starts = []

    def together(left, gpus, limit, log):
        starts.append([given.index(r) for r in left])
        return (2, False) if len(starts) == 1 else (len(left), True)

    monkeypatch.setattr(rows, "together", together)
    assert not rows.run(given, 4, 60, tmp_path / "log.txt")
    assert starts == [[0, 1, 2, 3], [2, 3]]
    assert rows.run(given[:0], 4, 60, tmp_path / "log.txt")
