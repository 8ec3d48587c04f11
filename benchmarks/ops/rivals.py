"""Production rows as Markdown: a table a part, the rivals as columns; what one cannot do stands in its cell."""

from __future__ import annotations

import itertools
from typing import Any

from .cases import Shape

Row = dict[str, Any]
TITLES = {
    "kimi": "KDA at Kimi's gate, −5 sigmoid(x)",
    "slow": "KDA, gates of −0.002",
    "mixed": "KDA, half-lives from 0.3 to 10,000 tokens",
    "qwen": "The gated delta rule, FlashQLA's table",
    "floors": "Beside the memory floor",
}
HEAD = "row|forward, ms|and backward|floors|error|host, µs|first, s|peak, GiB"


def markdown(rows: list[Row]) -> list[str]:
    """Tables of rows that have a part, in the order they came. Times are CUDA graphs where there are any; a rival's
    figures are forward / both, its times over ours of the same kind, its largest error."""
    out: list[str] = []
    for part, found in itertools.groupby(rows, key=lambda row: row["part"]):
        here = list(found)
        rivals = list(dict.fromkeys(side for row in here for side in row["sides"] if side != "ring_la"))
        columns = [*HEAD.split("|"), *rivals]
        lines = [[*_ours(row), *[_rival(row, name) for name in rivals]] for row in here]
        table = [columns, ["---"] * len(columns), *lines]
        out += ["", f"**{TITLES[part]}**", "", *[f"| {' | '.join(line)} |" for line in table]]
    return out


def _ours(row: Row) -> list[str]:
    mine, name = row["sides"]["ring_la"], _name(row)
    if "fwd" not in mine:
        return [name, mine.get("failed") or f"errors {mine.get('errors')}", *["–"] * 6]
    forward, both = _times(mine)
    floors = f"{(both or forward) / row['floor_ms']:.1f}" if "floor_ms" in row else "–"
    host = " / ".join(f"{mine[n]:.0f}" for n in ("host_us", "host_grad_us") if n in mine) or "–"
    return [name, f"{forward:.3f}", _number(both), floors, _largest(mine), host, *_more(mine)]


def _more(side: Row) -> list[str]:
    first, peak = side.get("first_s"), side.get("peak_gib")
    return [f"{first:.1f}" if first is not None else "–", f"{peak:.2f}" if peak is not None else "–"]


def _rival(row: Row, name: str) -> str:
    side, mine = row["sides"].get(name), row["sides"]["ring_la"]
    if side is None:
        return "–"
    if "fwd" not in side:
        said = side.get("failed") or f"errors {side.get('errors')}"
        return said.replace("|", "/").replace("\n", " ")[:90]
    pairs = [pair for key in ("fwd", "fwd_bwd") if (pair := _alike(side, mine, key))]
    over = " / ".join(f"{theirs / ours:.2f}" for theirs, ours, _ in pairs if ours) or "–"
    cell = f"{' / '.join(f'{theirs:.3f}{how}' for theirs, _, how in pairs)} ({over} ×), {_largest(side)}"
    if "host_us" not in side:
        return cell
    return f"{cell}, host {side['host_us']:.0f}, first {side.get('first_s', 0):.0f} s, {side['peak_gib']:.2f} GiB"


def _name(row: Row) -> str:
    shape = Shape.parse(row["shape"])
    lengths = "+".join(map(str, shape.apart)) if shape.apart else f"{shape.B} × {shape.T}"
    return f"{row['op']} " * (row["part"] == "floors") + f"{lengths}, {shape.heads} heads"


def _alike(side: Row, mine: Row, key: str) -> tuple[float, float | None, str] | None:
    """A rival's time and ours of the same kind: graphs where both have one, else eager calls, which the cell says."""
    if f"graph_{key}" in side and f"graph_{key}" in mine:
        return side[f"graph_{key}"], mine[f"graph_{key}"], ""
    return (side[key], mine.get(key), " eager") if key in side else None


def _times(side: Row) -> tuple[float, float | None]:
    return side.get("graph_fwd", side["fwd"]), side.get("graph_fwd_bwd", side.get("fwd_bwd"))


def _largest(side: Row) -> str:
    return f"{max(side['errors'].values()):.1e}".replace("e-0", "e-")


def _number(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.3f}"
