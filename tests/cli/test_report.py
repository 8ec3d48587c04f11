"""``ring-la report``: one file that shows a run, with nothing fetched and no label over another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ring_la.cli.main import main
from ring_la.errors import ArgumentError
from ring_la.reporting import plots, trace
from ring_la.reporting.page import write


def event(name: str, start: float, duration: float, kind: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration}


def a_run(folder: Path, ranks: int) -> Path:
    """What examples/train_hybrid.py leaves of three steps."""
    about = {
        "model": {"layers": ["gdn"], "repeat": 2, "transformers": None},
        "data": {"seq_len": 1000, "sequences": 1},
        "parallel": {"context": -1, "layout": "zigzag", "scan": "ring", "attention": "auto"},
        "run": {"steps": 3},
    }
    (folder / "profile").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(about))
    steps = [dict(step=n, loss=5.0 / n, tokens=1000 * n, tokens_per_second=1e5) for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (folder / "starts.jsonl").write_text(json.dumps({"axes": {"data": 1, "fsdp": 1, "context": ranks}}) + "\n")
    for rank in range(ranks):
        events = [
            event("ProfilerStep#3", 100, 100, "user_annotation"),
            event("gated_delta_rule_kernel", 90, 60),  # 50 of it in the step
            event("ncclDevKernel_SendRecv", 140, 30),  # 10 of it beside the kernel
        ]
        (folder / f"profile/rank-{rank}.json").write_text(
            json.dumps({"traceEvents": events, "baseTimeNanoseconds": 5000})
        )
    return folder


def test_a_training_run(tmp_path, capsys):
    run = a_run(tmp_path / "run", 2)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    for head in ("Run", "Loss", "Speed", "Who holds which tokens", "A step by rank"):
        assert f"<h2>{head}</h2>" in page
    assert "<title>tokens 0 … 249</title>" in page
    assert "<title>tokens 750 … 999</title>" in page
    assert "<th>rank 1</th><td>0.1</td>" in page
    assert not re.search(r"<script|https?://|src=", page)


def test_the_demo_and_folders_without_a_run(tmp_path, capsys):
    """The demo leaves losses.json, which is no benchmark's."""
    run = tmp_path / "demo"
    run.mkdir()
    assert main(["report", str(run)]) == 2
    said = f"the demo's losses.json, `ring-la bench`'s rows), got {run}, a folder with neither"
    assert said in capsys.readouterr().err
    (run / "losses.json").write_text(json.dumps([5.0 - n / 10 for n in range(30)]))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<tr><th>loss</th><td>5.0000 → 2.1000</td></tr>" in page
    assert "<h2>Loss</h2>" in page
    (run / "losses.json").write_text("{}")
    assert main(["report", str(run)]) == 2
    assert "RUN: expected a list of losses, one a step, in losses.json" in capsys.readouterr().err


def test_time_is_cut_to_the_step_and_exchange_that_is_hidden_is_told(tmp_path):
    (one,) = trace.read(a_run(tmp_path / "run", 1) / "profile")
    assert (one.start, one.stop) == (105, 205)
    assert (one.compute, one.exchange, one.hidden) == ([(105, 155)], [(145, 175)], 10)


def test_on_cpus_what_waits_is_not_computing(tmp_path):
    """An operator that calls others is not counted, they are; gloo's messages are on threads of their own."""
    events = [
        event("SplitRecurrence", 0, 100, "cpu_op"),
        event("aten::mm", 10, 20, "cpu_op"),
        event("c10d::allreduce_", 40, 5, "cpu_op"),
        event("gloo:all_reduce", 25, 50, "user_annotation") | {"tid": 9},
    ]
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    (one,) = trace.read(tmp_path)
    assert (one.compute, one.exchange, one.hidden) == ([(10, 30)], [(25, 75)], 5)


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", True),
        ("exchange_kernel", True),
        ("dense_link_kernel", True),
        ("arrived", True),
        ("meet", True),
        ("Memcpy PtoP (Device -> Device)", True),
        ("Memcpy DtoD (Device -> Device)", False),
        ("kda_forward", False),
        ("meet_in_the_middle", False),
    ],
)
def test_exchanges_between_gpus(tmp_path, name, exchange):
    """Mailboxes' messages, links and waits count, and copies between GPUs, not those within one."""
    kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [event(name, 0, 10, kind)]}))
    (one,) = trace.read(tmp_path)
    assert bool(one.exchange) is exchange
    assert bool(one.compute) is not exchange


def test_a_benchmark(tmp_path, capsys):
    results = Path(__file__).parents[2] / "benchmarks/results"
    shown = {
        "scan-h200x2": "kda, gates none, P 2, T 16384, forward, graph",
        "ops-h200": "rwkv7, 1x32768x32x128, forward + backward",
        "attention-h200x4": "causal, P 4, T 16384, forward + backward",
        "grouped-h200": "rows, G 64, sizes zipf",
    }
    for name, case in shown.items():
        assert main(["report", str(results / f"{name}.json"), "--out", str(tmp_path / f"{name}.html")]) == 0
        assert f"<h2>{case}</h2>" in (tmp_path / f"{name}.html").read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 2
    assert "RUN: expected a training run's folder or a benchmark's JSON" in capsys.readouterr().err


def test_what_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ArgumentError, match="out: expected a file that can be written"):
        write(a_run(tmp_path / "run", 1), tmp_path)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3.2, 3.2), (-5e-7, 2e6), (0, 1_048_576)])
def test_labels_keep_apart(low, high):
    marks = plots.ticks(low, high)
    assert marks[0] <= low <= high <= marks[-1]
    drawn = plots.lines([plots.Series("", (low, high + 1), (low, high))], "x", "y")
    at = sorted(float(x) for x in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">', drawn))
    widths = [len(t) * plots.LETTER for t in re.findall(r'text-anchor="middle">([^<]+)<', drawn)]
    assert all(b - a >= max(widths) for a, b in zip(at, at[1:]))


def test_a_label_that_has_room_is_not_cut():
    assert not [n for n in range(1, 50) if "…" in plots.bars([("a" * n, 1.0)], "ms")]
