"""ring-la bench ops on a CPU: every operator is right and measured, what is off is not, and a bad choice is named."""

from __future__ import annotations

import json

import pytest
import torch

from ring_la.cli.bench_ops import LIMIT, Worker, cases, measure, plan, report, side_row
from ring_la.cli.main import main


@pytest.mark.parametrize("name", cases.CASES)
def test_every_operator_is_right(name):
    case, shape = cases.CASES[name], cases.Shape(2, 1 if name.startswith("step") else 70, 2, 16, 8)
    found = measure.errors(case, case.ours, shape, "cpu")
    assert set(found) == {"o"} if case.step else {"o", "dv", "dx"} & set(found)
    assert max(found.values()) < 1e-4
    x = cases.inputs(case, shape, "cpu")
    assert cases.floor_bytes(case, x, case.ours(x)) > 0


def test_a_run(tmp_path, capsys):
    out = tmp_path / "ops.json"
    given = ["--ops", "bidirectional", "--shapes", "1x40x2x8", "--cold", "bidirectional", "--out", str(out)]
    assert main(["bench", "ops", *given]) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert set(row["sides"]) == {"ring_la", "torch"}
    for side in row["sides"].values():
        assert max(side["errors"].values()) < LIMIT
        assert 0 < side["fwd"] < side["fwd_bwd"]
    assert row["floor_ms"] > 0
    assert found["cold"]["bidirectional"]["ring_la"] > 0
    assert found["absent"]["fla"] == "needs a GPU"
    printed = capsys.readouterr().out
    assert "bidirectional" in printed
    assert "mamba_ssm: skipped" in printed
    pytest.importorskip("matplotlib")
    report.picture(found, tmp_path / "ops.png")
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_what_is_off_is_not_timed(monkeypatch):
    monkeypatch.setattr(Worker, "__init__", lambda self: None)
    monkeypatch.setattr(Worker, "measure", lambda self, shape, seconds: {"row": shape, "fwd": 1.0})
    worker = Worker()
    assert side_row(worker, {"errors": {"o": 1e-3, "dq": 2e-3}}, "1x1x1x1", 1)["fwd"] == 1.0
    for off in (0.5, float("nan")):
        assert "fwd" not in side_row(worker, {"errors": {"o": off}}, "1x1x1x1", 1)
    assert side_row(worker, {"failed": "it"}, "1x1x1x1", 1) == {"failed": "it"}
    row = {"op": "gla", "shape": "1x1x1x1", "sides": {"ring_la": {"failed": "OutOfMemoryError: 90 GiB"}}}
    assert "OutOfMemoryError" in report.line(row)
    case = cases.CASES["gla"]
    wrong = measure.errors(case, lambda x: 1.01 * case.ours(x), cases.Shape(1, 20, 2, 8, 8), "cpu")
    torch.testing.assert_close(torch.tensor(list(wrong.values())), torch.full((len(wrong),), 0.01), rtol=0.01, atol=0)


def test_the_plan():
    rows = plan(["step_gla", "gla", "mamba2"], ["1x8x2x4", "1x4x2x4"], "cuda")
    own = [("step_gla", "64x1x32x128"), ("mamba2", "1x32768x80x128x64")]
    assert rows == [("gla", "1x8x2x4"), ("gla", "1x4x2x4"), *own]


@pytest.mark.parametrize("bad", [("--ops", "banana"), ("--shapes", "1x2"), ("--cold", "pear")])
def test_bad_choices(bad, capsys):
    assert main(["bench", "ops", *bad]) == 2
    assert f"{bad[0][2:]}: expected" in capsys.readouterr().err
