"""ring-la bench ops on a CPU: every operator is right and measured, what is off is not, and a bad choice is named."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks import ROOT
from benchmarks.ops import cases, measure, report, rivals, tables
from benchmarks.ops.bench import LIMIT, Worker, parts_of, plan, side_row
from ring_la.cli.main import main
from ring_la.errors import ArgumentError


@pytest.mark.parametrize("name", cases.CASES)
def test_every_operator_is_right(name):
    case, shape = cases.CASES[name], cases.Shape(2, 1 if name.startswith("step") else 70, 2, 16, 8)
    found = measure.errors(case, case.ours, shape, "cpu")
    assert set(found) == {"o"} if case.step else {"o", "dv", "dx"} & set(found)
    assert max(found.values()) < 1e-4
    x = cases.inputs(case, shape, "cpu")
    assert cases.floor_bytes(case, x, case.ours(x)) > 0


def test_production_rows_come_first(tmp_path, capsys):
    out = tmp_path / "ops.json"
    given = ["--rows", "qwen:1x2048x2:8", "--rivals", "flash_qla", "--out", str(out)]
    assert main(["bench", "ops", *given]) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    mine = row["sides"]["ring_la"]
    assert max(mine["errors"].values()) < 1e-4
    assert {"o", "S", "dq", "dg", "dinitial_state"} <= set(mine["errors"])
    assert 0 < mine["fwd"] < mine["fwd_bwd"]
    assert mine["first_s"] > 0
    assert row["sides"]["flash_qla"] == {"failed": "needs a GPU"}
    later = {"op": "gla", "shape": "1x8x2x4", "floor_ms": 1.0, "sides": {"ring_la": {"failed": "it"}}}
    page = tables.markdown(found | {"rows": [later, row]}, "ops.json")
    assert page.index("FlashQLA's table") < page.index("| gla |")
    assert "| 20+13, 1:2 heads |" in page
    assert "needs a GPU |" in page
    parts = parts_of(argparse.Namespace(ops=None, shapes=None, rows=None), ["gla"], ["1x8x2x4"], "cuda")
    assert [part.name for part in parts] == ["kimi", "slow", "mixed", "qwen", "floors", "operators"]
    assert len(parts[3].rows) == 9 * 19


@pytest.mark.slow
def test_a_run_measures_every_side_and_saves_it(tmp_path, capsys):
    out = tmp_path / "ops.json"
    given = ["--ops", "bidirectional", "--shapes", "1x40x2x8", "--cold", "bidirectional", "--out", str(out)]
    assert main(["bench", "ops", *given]) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert set(row["sides"]) == {"ring_la", "torch"}
    for side in row["sides"].values():
        assert max(side["errors"].values()) < LIMIT
        assert min(side["fwd"], side["fwd_bwd"]) > 0
    assert row["floor_ms"] > 0
    assert found["cold"]["bidirectional"]["ring_la"] > 0
    assert found["absent"]["fla"] == "needs a GPU"
    printed = capsys.readouterr().out
    assert "bidirectional" in printed
    assert "mamba_ssm: skipped" in printed
    page = tmp_path / "page.md"
    page.write_text(f"{tables.BEGIN}\n{tables.END}\n")
    assert main(["bench", "ops", "--read", str(out), "--docs", str(page)]) == 0
    assert "| bidirectional |" in page.read_text()
    pytest.importorskip("matplotlib")
    report.picture(found, tmp_path / "ops.png")
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_the_page_says_what_was_measured(tmp_path):
    name = "benchmarks/results/ops-h200.json"
    found = json.loads((ROOT / name).read_text())
    assert tables.markdown(found, f"../../{name}") in (ROOT / "docs/developers/operators.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.write([(found, tmp_path / "raw/ops.json")], page)
    table = tables.markdown(found, "raw/ops.json")
    assert page.read_text() == f"before\n{tables.BEGIN}\n{table}\n{tables.END}\nafter\n"
    page.write_text(tables.END)
    with pytest.raises(ArgumentError, match="docs"):
        tables.write([(found, tmp_path / "ops.json")], page)


def test_what_is_slower_larger_or_less_exact_than_a_peer_is_listed():
    def side(fwd, gib, error):
        return {"fwd": fwd, "fwd_bwd": 3 * fwd, "peak_gib": gib, "host_us": 9.0, "errors": {"o": error}}

    row = {"op": "gla", "shape": "1x8x2x4", "floor_ms": 1.0, "sides": {"ring_la": side(2.0, 1.0, 3e-3)}}
    assert [line.split(": ")[1] for line in tables.behind([row])] == ["none."] * 3
    row["sides"]["fla"] = side(1.0, 0.5, 2e-3)
    slower, larger, wronger = tables.behind([row])
    assert "forward 0.50 (fla)" in slower
    assert "both 0.50 (fla)" in slower
    assert "1.00 (0.50)" in larger
    assert "gla o 3.0e-3 (2.0e-3)" in wronger
    row["sides"]["fla"] = {"failed": "LATE"}
    assert "| gla | 2.000 | 6.000 | 6.0 | – |" in tables.markdown(
        {"machine": {"device": "GPU", "commit": "1"}, "rows": [row]}, "ops.json"
    )


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


def test_operators_and_shapes_become_rows_without_repeats():
    rows = plan(["step_gla", "gla", "mamba2"], ["1x8x2x4", "1x4x2x4"], "cuda")
    own = [("step_gla", "64x1x32x128"), ("mamba2", "1x32768x80x128x64")]
    assert rows == [("gla", "1x8x2x4"), *own, ("gla", "1x4x2x4")]


@pytest.mark.parametrize(
    "bad",
    [
        ("--ops", "banana"),
        ("--shapes", "1x2"),
        ("--cold", "pear"),
        ("--rows", "kimi:9x9"),
        ("--rivals", "plum"),
        ("--docs", "page.md"),
        ("--read", "none.json"),
    ],
)
def test_bad_choices_are_named(bad, capsys):
    assert main(["bench", "ops", *bad]) == 2
    assert f"{bad[0][2:]}: expected" in capsys.readouterr().err


def test_a_rivals_time_is_beside_ours_of_the_same_kind():
    def side(**times):
        return {"errors": {"o": 1e-3}} | times

    mine = side(fwd=0.2, graph_fwd=0.1, fwd_bwd=1.0, graph_fwd_bwd=0.4)
    theirs = side(fwd=0.3, graph_fwd=0.2, fwd_bwd=0.5)
    row = {"part": "kimi", "op": "kda_kimi", "shape": "1x8x2x4", "sides": {"ring_la": mine, "cudnn": theirs}}
    assert "0.200 / 0.500 eager (2.00 / 0.50 ×)" in rivals.markdown([row])[-1]
