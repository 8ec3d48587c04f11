"""The measured rows as a table and as a picture."""

from __future__ import annotations

import pathlib
from typing import Any

from ..bars import grouped_bars, legend_above
from ..peers.ops import GUARD, GUARDED

Row = dict[str, Any]
HOST = ("host_us", "host_grad_us", "graph_host_us")


def line(row: Row) -> str:
    """One operator at one shape: ours, then each peer with its times over ours."""
    mine = row["sides"].get("ring_la", {})
    parts = [f"{row['op']:21s} {row['shape']:16s}", _side("ring_la", mine, row)]
    for name, theirs in row["sides"].items():
        if name != "ring_la":
            mark = "*" if name == "fla" and row["op"] in GUARDED else ""
            parts.append(_side(name + mark, theirs, row, mine))
    return " | ".join(parts)


def _side(name: str, side: Row, row: Row, mine: Row | None = None) -> str:
    if "fwd" not in side:
        return f"{name}: {side.get('failed') or 'errors ' + str(side.get('errors'))}"[:150]
    times = "/".join(f"{side[n]:.3f}" for n in ("fwd", "fwd_bwd") if n in side) + " ms"
    if "graph_fwd" in side:
        graphs = "/".join(f"{side[n]:.3f}" for n in ("graph_fwd", "graph_fwd_bwd") if n in side)
        times += f" (graph {graphs})"
    if mine and "fwd" in mine:
        times += (
            " = " + "/".join(f"{side[n] / mine[n]:.2f}" for n in ("fwd", "fwd_bwd") if n in side and n in mine) + "x"
        )
    elif mine is None and "floor_ms" in row:
        times += f" = {side.get('fwd_bwd', side.get('graph_fwd', side['fwd'])) / row['floor_ms']:.1f} floors"
    more = (
        f" host {'/'.join(f'{side[n]:.0f}' for n in HOST if n in side)} us, {side['peak_gib']:.2f} GiB"
        if ("peak_gib" in side)
        else ""
    )
    return f"{name}: {times}{more}, err {max(side['errors'].values()):.1e}"


def notes(found: Row) -> list[str]:
    """What a reader of the table has to know."""
    out = [f"{peer}: skipped ({why})" for peer, why in found["absent"].items()]
    if any("fla" in row["sides"] and row["op"] in GUARDED for row in found["rows"]):
        out.append(f"*: {GUARD}")
    for name, sides in found.get("cold", {}).items():
        seconds = ", ".join(f"{side} {s}" for side, s in sides.items())
        out.append(f"first forward and backward of {name} from a cold cache, s: {seconds}")
    return out


def picture(found: Row, file: pathlib.Path) -> None:
    """Forward and backward of every operator over the memory floor, a panel a shape; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    key = "fwd_bwd"
    rows = [r for r in found["rows"] if any(key in s for s in r["sides"].values()) and "floor_ms" in r]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    if not shapes:
        return
    size = (11, 3 * len(shapes) + 0.8)
    figure, axes = pyplot.subplots(len(shapes), 1, figsize=size, squeeze=False, layout="constrained")
    shown = dict.fromkeys(name for r in rows for name in r["sides"])
    colours = {name: f"C{i}" for i, name in enumerate(shown)}
    for axis, shape in zip(axes[:, 0], shapes):
        here = [r for r in rows if r["shape"] == shape]
        floors = {name: [_floors(r, name, key) for r in here] for name in shown}
        grouped_bars(axis, [r["op"] + ("*" if r["op"] in GUARDED else "") for r in here], floors, colours)
        axis.set_title(f"{shape}: forward + backward, multiples of the memory floor", fontsize=9)
    legend_above(figure, f"{found['machine']['device']}   (*: {GUARD})")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _floors(row: Row, side: str, key: str) -> float | None:
    """A side's time as multiples of the memory floor, where it has one."""
    ms = row["sides"].get(side, {}).get(key)
    return None if ms is None else ms / row["floor_ms"]
