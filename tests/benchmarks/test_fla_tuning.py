"""What makes fla-core's kernels ready counts what its processes did, whatever else libraries print there."""

from __future__ import annotations

import pytest

from benchmarks.peers import fla_tuning

PROGRAM = """
import sys, time

def main():
    what, *more, listed = sys.argv[1:]
    print("a library says `out_idx=None`", flush=True)
    if what == "tune":
        for row in listed.split(","):
            print("tuned:", *row.split(":"), flush=True)
    elif more[0] == "0":
        time.sleep(600)
    else:
        print(3)
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_that_is_stopped_counts_as_unfinished(jobs, tmp_path, monkeypatch):
    (tmp_path / "talkative.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = fla_tuning.tune([("kda", "1"), ("gla", "2")], 3.0, jobs, "talkative")
    assert found["compiled"] == 3 * (jobs - 1)
    assert found["unfinished"] == 1
    assert found["tuned"] == found["of"] == 2
    assert not found["failed"]
