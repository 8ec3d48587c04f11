"""``ring-la bench scan`` on two ranks: every arm agrees with the whole sequence and is timed; what it writes."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
import torch.distributed as dist

import ring_la
from benchmarks.scan import bench
from benchmarks.scan.arms import OPS, Team, gate_kinds, gradients, promised, tokens, truth
from benchmarks.scan.report import Report
from ring_la.cli.transitions import TRANSITIONS
from ring_la.scan import STRATEGIES
from tests.support.pool import group

ARMS = {"local", "alone", *STRATEGIES, "auto", "LASP pattern", "LASP-2 pattern", "Ulysses pattern"}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_what_is_measured_is_what_the_planner_knows():
    assert list(OPS) == list(TRANSITIONS)


@pytest.mark.parametrize("word", ["--ops=x", "--gates=x", "--ranks=0", "--lengths=x", "--totals=0", "--skip=kda"])
def test_wrong_words_are_named(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        options(word)
    assert f"{word.partition('=')[0]}: expected " in capsys.readouterr().err
    assert options("--skip=kda:FLA,").skip == [("kda", "FLA")]  # as launch/bench_scan.sh writes it, or empty
    assert options("--skip=").skip == []


def check_bench(rank: int, folder: str) -> list[dict]:
    shape = ("--lengths", "64", "--heads", "4", "--width", "16", "--rounds", "1", "--inner", "1", "--out", folder)
    args = options("--ops", "retention,gated_delta_rule", "--gates", "trained", *shape)
    alone = dist.new_group([rank], use_local_synchronization=True)
    report = Report(args)
    bench.bench(Team(group(), alone), args, report)
    report.finish()
    return report.rows


def test_every_arm_is_right_and_timed(ranks, tmp_path):
    rows = ranks.run(2, check_bench, str(tmp_path))[0]
    passes = [row for row in rows if row["what"] != "exchange"]
    assert [(row["op"], row["what"]) for row in passes] == [
        (op, what) for op in ("retention", "gated_delta_rule") for what in ("forward", "forward+backward")
    ]
    for row in passes:
        assert not row["failed"]
        assert set(row["ms"]) == ARMS
        assert all(ms > 0 for ms in row["ms"].values())
        assert set(row["exchange_ms"]) == set(STRATEGIES)
        assert row["choice"]["pick"] == min(row["exchange_ms"], key=row["exchange_ms"].get)
    alone = [row for row in rows if row["what"] == "exchange"]
    assert [(row["op"], set(row["ms"])) for row in alone] == [(k, set(STRATEGIES)) for k in ("scalar", "dense")]
    assert json.loads((tmp_path / "bench_scan.json").read_text())["rows"] == rows


def check_wrong(rank: int, folder: str) -> dict[str, str]:
    """An arm whose result is off is not timed."""
    args = options("--ops", "retention", "--heads", "4", "--width", "16", "--out", folder, "--arms", "ring,doubling")
    team = Team(group(), dist.new_group([rank], use_local_synchronization=True))
    right = team.arms
    spoilt = {"ring": lambda f: lambda *x: 1.01 * f(*x), "doubling": lambda f: f}
    team.arms = lambda *a: {n: spoilt[n](f) for n, f in right(*a).items()}
    case = bench.Case("retention", "trained", 2, 64, "")
    calls, failed = bench.checked(team, case, torch.float32, args)
    return failed | {n: "timed" for n in calls}


def test_a_wrong_arm_is_not_timed(ranks, tmp_path):
    found = ranks.run(2, check_wrong, str(tmp_path))[0]
    assert found["doubling"] == "timed"
    assert found["ring"].startswith("wrong: error 1.0e-02")


def check_production(rank: int, folder: str) -> list[dict]:
    """Gates of the production rows, fewer heads of keys than of values, and no gates where there are none such."""
    shape = ("--lengths", "64", "--heads", "4", "--keys", "2", "--width", "16", "--checked", "64", "--out", folder)
    ops = ("--ops", "gated_delta_rule,kda,gla", "--gates", "production")
    args = options(*ops, *shape, "--rounds", "1", "--inner", "1", "--arms", "local,auto,Ulysses")
    alone = dist.new_group([rank], use_local_synchronization=True)
    report = Report(args)
    bench.bench(Team(group(), alone), args, report)
    return report.rows


def test_production_gates_and_fewer_keys(ranks, tmp_path):
    rows = [row for row in ranks.run(2, check_production, str(tmp_path))[0] if row["what"] != "exchange"]
    assert [row["op"] for row in rows] == ["gated_delta_rule"] * 2 + ["kda"] * 2
    for row in rows:
        assert not row["failed"]
        assert set(row["ms"]) == {"local", "auto", "Ulysses pattern"}
        assert set(row["errors"]) == {"auto", "Ulysses pattern"}
        assert max(row["errors"].values()) < 1e-4


def check_agreed(rank: int) -> tuple[list[str], dict[str, str]]:
    graphs = {"auto": print, "ring": print} if rank else {"auto": print}
    team = Team(group(), dist.new_group([rank], use_local_synchronization=True))
    found, refused = bench.agreed(team.group, graphs, {} if rank else {"ring": "not capturable: it said so"})
    return list(found), refused


def test_what_one_rank_cannot_capture_no_rank_replays(ranks):
    (first, why), (second, other) = ranks.run(2, check_agreed)
    assert first == second == ["auto"]
    assert (why["ring"], other["ring"]) == ("not capturable: it said so", "not capturable on another rank")


def test_a_bound_is_said_of_kimis_gates_alone():
    assert promised("kda", "production") == {"lower_bound": -5.0}
    assert not promised("kda", "trained")
    assert not promised("gated_delta_rule", "production")
    q, _, v, g, beta = tokens("kda", "production", (8, 4, 16), torch.bfloat16, torch.device("cpu"), 0, keys=2)
    assert (q.shape[2], v.shape[2]) == (2, 4)
    assert (q.dtype, g.dtype, beta.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert -5 <= g.min() <= g.max() <= 0


def test_of_mixed_gates_a_head_of_eight_forgets_nothing():
    assert promised("kda", "mixed") == {"lower_bound": -5.0}
    assert gate_kinds("kda", ["production", "mixed"]) == ["production", "mixed"]
    assert gate_kinds("gated_delta_rule", ["production", "mixed"]) == ["production"]
    g = tokens("kda", "mixed", (40, 10, 16), torch.bfloat16, torch.device("cpu"), 0)[3].mean((0, 1, 3))
    assert (g > -0.01).tolist() == [h % 8 == 0 for h in range(10)]


def test_the_truth_of_some_heads_at_a_time_is_that_of_all():
    whole = tokens("gated_delta_rule", "trained", (32, 8, 16), torch.float32, torch.device("cpu"), 0, keys=4)
    do = torch.randn_like(whole[2])
    wide = [x.detach().double().requires_grad_() for x in whole]
    every = gradients(lambda *x: ring_la.gated_delta_rule(*x, backend="torch").o, wide, do.double())
    torch.testing.assert_close(truth("gated_delta_rule", whole, do), every)
