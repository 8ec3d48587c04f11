"""What ``ring-la bench scan`` found: lines as it goes, the JSON file, the picture."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_la.scan import STRATEGIES, CostModel

from ..bars import grouped_bars, legend_above
from ..peers import fla_tuning
from ..rows import machine, save
from .arms import UNSPLIT

CLOSE = 1.05
"""Two arms closer than this are one: runs of the same arm differ as much."""


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        T: tokens a rank.
        what: "forward", "forward+backward", or "exchange": the exchange alone, `op` then being the shape of A.
    """

    op: str
    gates: str
    P: int
    T: int
    what: str


class Report:
    """Collects the rows on rank 0: prints them, keeps the JSON file up to date, draws the picture."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start, self.rows, self.wrong = args, time.monotonic(), [], 0
        self.writes = dist.get_rank() == 0
        self.speeds: dict[str, float] = {}
        self.groups: dict[int, dict] = {}
        self.path = args.out / "bench_scan.json"
        cuda = torch.cuda.is_available()
        self.machine = machine() | dict(
            ranks=dist.get_world_size(), transport=args.transport, heads=args.heads, width=args.width,
            keys=args.keys or args.heads, rounds=args.rounds, inner=args.inner, lead=args.lead,
            dtype="bfloat16" if cuda else "float32",
        )  # fmt: skip
        if self.writes:
            args.out.mkdir(parents=True, exist_ok=True)
        if few := os.environ.get(fla_tuning.FEW):
            self.machine["fla_configurations"] = int(few)

    def group(self, P: int, cost: CostModel | None) -> None:
        """α and β of every pattern, as measured on P ranks."""
        if cost is None:
            return
        self.groups[P] = cost.to_dict()
        lines = [(n, x) for n, x in self.groups[P].items() if isinstance(x, list)]
        shown = [f"{n} {alpha * 1e6:.1f} µs {beta / 1e9:.2f} G/s" for n, (alpha, beta) in lines]
        self.say(f"{P} ranks: {', '.join(shown)}, post {cost.post * 1e6:.1f} µs, launch {cost.launch * 1e6:.1f} µs")

    def say(self, line: str) -> None:
        if self.writes:
            print(line, flush=True)

    def add(
        self,
        case: Case,
        times: dict[str, float],
        predicted: dict[str, float],
        failed: dict[str, str],
        mode: str = "eager",
        errors: dict[str, float] | None = None,
    ) -> None:
        """One case's arms: seconds, the model's seconds of the exchange, what was not timed and why, and the largest
        relative errors of those that were compared."""
        self.wrong += sum(why.startswith("wrong") for why in failed.values())
        key = dict(**case._asdict(), mode=mode, at=round(time.monotonic() - self.start, 1))
        row: dict[str, Any] = key | dict(ms={n: round(t * 1e3, 4) for n, t in times.items()}, failed=dict(failed))
        if errors:
            row["errors"] = {n: float(f"{off:.3g}") for n, off in errors.items()}
        if predicted:
            row["exchange_ms"] = {n: round(t * 1e3, 4) for n, t in predicted.items()}
            row["choice"] = choice(row)
        self.rows.append(row)
        self.say(line(row))
        if self.writes:
            found = dict(machine=self.machine, speeds=self.speeds, groups=self.groups, rows=self.rows)
            save(self.path, found)

    def finish(self) -> None:
        for what in ("exchange", "forward", "forward+backward"):
            judged = [row["choice"] for row in self.rows if row["what"] == what and row.get("choice")]
            right = sum(c["behind"] <= CLOSE for c in judged)
            if judged:
                found = f"the model picks the winner, or one within {CLOSE - 1:.0%}, in {right} of {len(judged)} cases"
                self.say(f"{what}: {found}")
        if self.writes:
            picture(self.rows, self.args.out / "bench_scan.png", self.machine)


def choice(row: dict[str, Any]) -> dict[str, Any]:
    """The strategy the model picks, the one measured fastest, and how far the pick is behind (a ratio of times)."""
    timed = {n: row["ms"][n] for n in STRATEGIES if n in row["ms"]}
    if len(timed) < 2:
        return {}
    pick = min((n for n in timed), key=row["exchange_ms"].__getitem__)
    best = min(timed, key=timed.__getitem__)
    return dict(pick=pick, best=best, behind=round(timed[pick] / timed[best], 3))


def line(row: dict[str, Any]) -> str:
    bound = row["ms"].get("local")
    head = f"{row['op']:17}{row['gates']:11}P{row['P']} T{row['T']:<6} {row['what']:17}{row['mode']:6}"
    cells = []
    for label, ms in row["ms"].items():
        bare = row["ms"].get(label.replace("CP", "local")) if label.endswith(" CP") else bound
        share = "" if bare is None or label in UNSPLIT else f" {bare / ms:.0%}"
        predicted = row.get("exchange_ms", {}).get(label) if row["what"] == "exchange" else None
        cells.append(f"{label} {ms:.3f}{share}" + ("" if predicted is None else f" (predicted {predicted:.3f})"))
    cells += [f"{label}: {why}" for label, why in row["failed"].items()]
    if row.get("exchange_ms") and row["what"] != "exchange":
        pick = min(row["exchange_ms"], key=row["exchange_ms"].__getitem__)
        cells.append(f"exchange predicted {pick} {row['exchange_ms'][pick]:.3f}")
    if row.get("choice"):
        cells.append("picks {pick}, best {best} (x{behind})".format(**row["choice"]))
    return head + " | ".join(cells)


def picture(rows: list[dict[str, Any]], path: Path, machine: dict[str, Any]) -> None:
    """Shares of the bound, a panel for each P, T and pass, a group of bars for each op."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["P"] > 1 and "local" in row["ms"]]
    panels = sorted({(row["P"], row["T"], row["what"], row["mode"]) for row in rows})
    if not panels:
        return
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (7.5 * columns, 2.9 * lines + 0.8)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", sharey=True)
    shown = [
        n for n in dict.fromkeys(n for row in rows for n in row["ms"]) if n != "local" and not n.endswith(" local")
    ]
    colours = {arm: plt.get_cmap("tab20")(i) for i, arm in enumerate(shown)}
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (P, T, what, how) in zip(axes.flat, panels):
        here = [r for r in rows if (r["P"], r["T"], r["what"], r["mode"]) == (P, T, what, how)]
        shares = {arm: [r["ms"]["local"] / r["ms"][arm] if arm in r["ms"] else None for r in here] for arm in shown}
        labels = [r["op"] if r["gates"] == "trained" else f"{r['op']}\ngates: {r['gates']}" for r in here]
        grouped_bars(axis, labels, shares, colours)
        axis.set_title(f"{P} ranks, {T:,} tokens each, {what}, {how}", fontsize=9)
        axis.axhline(1, color="black", linewidth=0.5)
    legend_above(figure, f"Share of the local kernel's speed, {machine['device']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
