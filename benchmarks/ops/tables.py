"""The measured rows as Markdown, written into a page between two marks so that its figures are those of the run.

ring-la bench ops --read benchmarks/results/ops-h200.json --docs docs/developers/operators.md

Several runs after --read stand one behind the other, each with its machine and its raw file.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from ring_la.errors import ArgumentError

from ..peers.ops import GUARD, GUARDED
from . import rivals
from .cases import Shape

BEGIN, END = "<!-- ring-la bench ops -->", "<!-- end of ring-la bench ops -->"
WORSE = 1.1
"""An error that many times the peer's is listed."""
Row = dict[str, Any]


def write(runs: Iterable[tuple[Row, pathlib.Path]], page: pathlib.Path) -> None:
    """Put the tables of runs, each with the file it is kept in, between the marks of `page`.

    Raises:
        ArgumentError: the page has no such marks.
    """
    text = page.read_text()
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise ArgumentError("docs", f"a page with {BEGIN} and {END}", str(page))
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    folder = page.resolve().parent
    found = [markdown(run, os.path.relpath(source.resolve(), folder)) for run, source in runs]
    between = "\n\n".join(found)
    page.write_text(f"{head}{BEGIN}\n{between}\n{tail}")


def markdown(found: Row, link: str) -> str:
    """A table for each shape, then what is behind a peer; `link` leads to the raw figures."""
    made = found["machine"]
    versions = ", ".join(f"{n} {made[n]}" for n in ("torch", "triton", "fla-core") if made.get(n, "absent") != "absent")
    commit = "" if made["commit"] == "unknown" else f", commit {made['commit']}"
    out = [f"{made['device']}, {versions}{commit}\n([raw]({link})). ×: the peer's time over ours."]
    out += rivals.markdown([row for row in found["rows"] if "part" in row])
    found = found | {"rows": [row for row in found["rows"] if "part" not in row]}
    if not found["rows"]:
        return "\n".join(out)
    for shape, rows in itertools.groupby(sorted(found["rows"], key=_order(found["rows"])), key=lambda r: r["shape"]):
        rows = list(rows)
        table = _steps if all(r["op"].startswith("step_") for r in rows) else _calls
        out += ["", _title(Shape.parse(shape)), "", *table(rows)]
    out += ["", *[f"- {line}" for line in (*_cold(found), *behind(found["rows"]))]]
    if any("fla" in r["sides"] and r["op"] in GUARDED for r in found["rows"]):
        out.append(f"- ¹ {GUARD}.")
    return "\n".join(out)


def behind(rows: list[Row]) -> list[str]:
    """Where a peer is faster, needs less memory or has smaller errors, a line each."""
    slower, larger = [], []
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for row, mine, peer, theirs in _pairs(rows):
        where = f"{row['op']} {row['shape']}"
        for name, key in (("forward", "fwd"), ("both", "fwd_bwd")):
            if key in theirs and theirs[key] < mine[key]:
                slower.append(f"{where} {name} {theirs[key] / mine[key]:.2f} ({peer})")
        if theirs.get("peak_gib", 0) < mine.get("peak_gib", 0):
            larger.append(f"{where} {mine['peak_gib']:.2f} ({theirs['peak_gib']:.2f})")
        for name, e in mine["errors"].items():
            over = e / theirs["errors"][name]
            said = f"{row['op']} {name} {_short(e)} ({_short(theirs['errors'][name])})"
            if over > WORSE:
                worst[row["op"], name] = max((over, said), worst.get((row["op"], name), (0.0, "")))
    lists = (
        ("Slower than a peer", slower),
        ("More memory at the peak, GiB, than a peer", larger),
        (f"Errors more than {WORSE} times a peer's, at the worst shape", [said for _, said in worst.values()]),
    )
    return [f"{what}: {'; '.join(said) or 'none'}." for what, said in lists]


def _pairs(rows: list[Row]) -> list[tuple[Row, Row, str, Row]]:
    """(row, our side, a peer's name, its side) where both were timed."""
    return [
        (row, row["sides"]["ring_la"], name, side)
        for row in rows
        for name, side in row["sides"].items()
        if name != "ring_la" and "fwd" in side and "fwd" in row["sides"]["ring_la"]
    ]


def _order(rows: list[Row]):
    """Shapes as they came first, and operators within them."""
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    return lambda r: shapes.index(r["shape"])


def _title(s: Shape) -> str:
    return f"**B {s.B}, T {s.T}, {s.H} heads, " + (f"K = V = {s.K}**" if s.K == s.V else f"K {s.K}, V {s.V}**")


def _calls(rows: list[Row]) -> list[str]:
    times = "op|forward, ms|and backward|floors|beside|forward ×|both ×|both as graphs ×"
    head = f"{times}|peak, GiB|host, µs|with gradients|a graph|error"
    return _table(head, [line for row in rows for line in _lines(row, _call)])


def _steps(rows: list[Row]) -> list[str]:
    head = "one token|ms|in a graph|of a copy's bandwidth|beside|×|in a graph ×|peak, GiB|host, µs|a graph|error"
    return _table(head, [line for row in rows for line in _lines(row, _step)])


def _lines(row: Row, cells) -> list[list[str]]:
    """A line for each peer that was timed; one without where none was."""
    mine = row["sides"]["ring_la"]
    mark = "¹" if row["op"] in GUARDED and "fla" in row["sides"] else ""
    name = row["op"].removeprefix("step_") + mark
    if "fwd" not in mine:
        return [[name, str(mine.get("failed", "errors too large"))]]
    peers = [(peer, side) for _, _, peer, side in _pairs([row])]
    return [[name, *cells(row, mine, peer, side)] for peer, side in peers or [("–", {})]]


def _call(row: Row, mine: Row, peer: str, side: Row) -> list[str]:
    return [
        f"{mine['fwd']:.3f}", f"{mine['fwd_bwd']:.3f}", f"{mine['fwd_bwd'] / row['floor_ms']:.1f}", peer,
        *_over(mine, side, "fwd", "fwd_bwd", "graph_fwd_bwd"), *_both(mine, side, ".2f", "peak_gib"),
        *_both(mine, side, ".0f", "host_us", "host_grad_us", "graph_host_us"), _errors(mine, side),
    ]  # fmt: skip


def _step(row: Row, mine: Row, peer: str, side: Row) -> list[str]:
    graph = mine.get("graph_fwd")
    share = "–" if graph is None else f"{row['floor_ms'] / graph:.0%}"
    return [
        f"{mine['fwd']:.3f}", "–" if graph is None else f"{graph:.3f}", share, peer,
        *_over(mine, side, "fwd", "graph_fwd"), *_both(mine, side, ".2f", "peak_gib"),
        *_both(mine, side, ".0f", "host_us", "graph_host_us"), _errors(mine, side),
    ]  # fmt: skip


def _over(mine: Row, side: Row, *keys: str) -> list[str]:
    return [f"{side[k] / mine[k]:.2f}" if k in side and k in mine else "–" for k in keys]


def _both(mine: Row, side: Row, form: str, *keys: str) -> list[str]:
    """Ours, and the peer's in brackets."""
    return [(f"{mine[k]:{form}}" if k in mine else "–") + (f" ({side[k]:{form}})" if k in side else "") for k in keys]


def _errors(mine: Row, side: Row) -> str:
    largest = [_short(max(s["errors"].values())) for s in (mine, side) if "errors" in s]
    return largest[0] + "".join(f" ({e})" for e in largest[1:])


def _short(error: float) -> str:
    return f"{error:.1e}".replace("e-0", "e-")


def _table(head: str, lines: list[list[str]]) -> list[str]:
    columns = head.split("|")
    padded = [line + ["–"] * (len(columns) - len(line)) for line in lines]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *[f"| {' | '.join(x)} |" for x in padded]]


def _cold(found: Row) -> list[str]:
    return [
        f"First forward and backward of {name} with empty caches, side by side: "
        + ", ".join(f"{side} {s if isinstance(s, str) else f'after {s:.1f} s'}" for side, s in sides.items())
        + "."
        for name, sides in found.get("cold", {}).items()
    ]
