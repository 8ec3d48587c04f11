"""The sections of a training run's report, from the files that examples/train_hybrid.py and train_demo.py leave."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..layout import Layout
from . import plots, trace

Section = tuple[str, str]
"""A heading, and HTML below it."""
COMPUTE, EXCHANGE = plots.COLOURS[0], plots.COLOURS[1]
METRICS = (
    ("loss", "Loss", "cross-entropy, nats a token"),
    ("tokens_per_second", "Speed", "tokens a second, all ranks"),
    ("peak_memory_gib", "Memory", "GiB at most so far, rank 0"),
)


def sections(run: Path) -> list[Section]:
    """All of them.

    Raises:
        ArgumentError: no run is there.
    """
    about, steps, starts = _json(run / "config.json"), _lines(run / "metrics.jsonl"), _lines(run / "starts.jsonl")
    if not isinstance(about, dict) or not steps:
        expected = "a folder with config.json and metrics.jsonl, of a run with at least one step"
        raise ArgumentError("RUN", expected, str(run))
    out = [("Run", _facts(about, steps, starts))]
    for key, title, unit in METRICS:
        points = [(s["step"], s[key]) for s in steps if key in s]
        if points:
            out.append((title, _curve(points, unit, smooth=key == "loss")))
        elif key == "peak_memory_gib":
            out.append((title, "<p>Not measured: the run was on CPUs.</p>"))
    out.append(("Who holds which tokens", _split(about, starts)))
    out.append(("A step by rank", _timeline(run / "profile")))
    return out


def demo_sections(run: Path) -> list[Section]:
    """Those of a folder that examples/train_demo.py left: it keeps the losses alone.

    Raises:
        ArgumentError: no losses are there.
    """
    losses = _json(run / "losses.json")
    if not isinstance(losses, list) or not losses or not all(isinstance(loss, (int, float)) for loss in losses):
        raise ArgumentError("RUN", "a list of losses, one a step, in losses.json", str(run))
    rows = (("steps", f"{len(losses)}"), ("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    cells = "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in rows)
    kept = "<p>The demo keeps its losses alone; examples/train_hybrid.py also writes down speed, memory and ranks.</p>"
    curve = _curve(list(enumerate(losses, 1)), "cross-entropy, nats a token", smooth=True)
    return [("Run", f"<table>{cells}</table>{kept}"), ("Loss", curve)]


def _curve(points: list[tuple[int, float]], unit: str, smooth: bool) -> str:
    """Values by step, and their running mean where there are enough."""
    x, y = zip(*points)
    series = [plots.Series("each step", x, y)]
    if smooth and len(y) > 20:
        series.append(plots.Series("mean of the last tenth", x, _smooth(y)))
    return plots.lines(series, "step", unit)


def _facts(about: dict[str, Any], steps: list[dict[str, Any]], starts: list[dict[str, Any]]) -> str:
    last, half = steps[-1], steps[len(steps) // 2 :]
    speed = sum(s["tokens_per_second"] for s in half) / len(half)
    model = about["model"].get("transformers") or f"{', '.join(about['model']['layers'])} × {about['model']['repeat']}"
    rows = [
        ("model", model),
        (
            "steps",
            f"{last['step']} of {about['run']['steps']}, {last['tokens']:,} tokens, started {len(starts)} time(s)",
        ),
        ("loss", f"{steps[0]['loss']:.4f} → {last['loss']:.4f}"),
        ("speed", f"{speed:,.0f} tokens a second (mean of the second half)"),
        ("sequence", f"{about['data']['seq_len']:,} tokens, {about['data']['sequences']} a step"),
        ("ranks", _axes(starts)),
        ("exchange", f"scan {about['parallel']['scan']}, attention {about['parallel']['attention']}"),
    ]
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows)
    config = escape(json.dumps(about, indent=1))
    return f"<table>{cells}</table><details><summary>config.json</summary><pre>{config}</pre></details>"


def _axes(starts: list[dict[str, Any]]) -> str:
    axes = starts[-1].get("axes") if starts else None
    return " × ".join(f"{name} {n}" for name, n in axes.items()) if axes else "not written down by this run"


def _split(about: dict[str, Any], starts: list[dict[str, Any]]) -> str:
    """The layout of a whole sequence, a lane a rank; packed documents do not change it."""
    axes = starts[-1].get("axes") if starts else None
    ranks = axes["context"] if axes else about["parallel"]["context"]
    if ranks < 1:
        return "<p>The run did not write down on how many ranks it was.</p>"
    length, kind = about["data"]["seq_len"], about["parallel"]["layout"]
    layout, rows = Layout(length, kind, ranks), []
    for rank in range(ranks):
        spans = [layout.segments[i] for i in layout.local_segments(rank)]
        told = [plots.Bar(s.start, s.stop, COMPUTE, f"tokens {s.start:,} … {s.stop - 1:,}") for s in spans]
        rows.append((f"rank {rank}", told))
    said = (
        f"{escape(kind)}: {length:,} tokens over {ranks} rank(s) of the context axis, {layout.lengths[0]:,} on rank 0."
    )
    return f"<p>{said}</p>" + plots.lanes(rows, 0, length, "token of the sequence")


def _timeline(folder: Path) -> str:
    """When each rank computes and exchanges, in the first profiled step."""
    ranks = trace.read(folder) if folder.is_dir() else []
    if not ranks:
        return "<p>No profile: train with --run.profile 1, which traces the third step of a start.</p>"
    one_clock = max(r.start for r in ranks) - min(r.start for r in ranks) < max(r.stop - r.start for r in ranks)
    began = min(r.start for r in ranks)
    longest = max(r.stop - (began if one_clock else r.start) for r in ranks)
    rows: list[tuple[str, list[plots.Bar]]] = []
    table = []
    for r in ranks:
        zero = began if one_clock else r.start
        for name, part, colour in (("compute", r.compute, COMPUTE), ("exchange", r.exchange, EXCHANGE)):
            drawn = [((a - zero) / 1e3, (b - zero) / 1e3) for a, b in trace.merged(part, longest / 1500)]  # one column
            rows.append(
                (f"rank {r.rank} {name}", [plots.Bar(a, b, colour, f"{name}, {b - a:.2f} ms") for a, b in drawn])
            )
        compute, exchange = (1e3 * r.seconds(part) for part in (r.compute, r.exchange))
        cells = ((r.stop - r.start) / 1e3, compute, exchange, exchange - r.hidden / 1e3)
        table.append(f"<tr><th>rank {r.rank}</th>{''.join(f'<td>{ms:.1f}</td>' for ms in cells)}</tr>")
    head = "<tr><th></th><td>step</td><td>compute</td><td>exchange</td><td>of it not hidden</td></tr>"
    note = "" if one_clock else "<p>The hosts' clocks differ: every rank's step begins at 0.</p>"
    key = plots.legend((("compute", COMPUTE), ("exchange", EXCHANGE)))
    drawn_lanes = plots.lanes(rows, 0, longest / 1e3, "ms")
    return f"{note}{key}{drawn_lanes}<table><caption>ms</caption>{head}{''.join(table)}</table>"


def _smooth(y: tuple[float, ...]) -> list[float]:
    window, total, out = max(2, len(y) // 10), 0.0, []
    for i, value in enumerate(y):
        total += value - (y[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
