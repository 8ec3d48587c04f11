"""Pictures as SVG text. Labels have room of their own: what does not fit is left out, and is told by the tooltip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 240, 76, 20, 14, 40
HEAD = 30
"""Of lines: room for what the upward axis shows, above its highest mark."""
LETTER = 6.6
"""Width of a letter at the size of labels, rounded up."""
POINTS = 1200
"""Points of a line at most: more than the picture has columns."""
COLOURS = ("#2a6fbb", "#d9722e", "#3f9b6c", "#8a5cb8", "#b8485f", "#7a7a35", "#4aa3b8", "#9a6b4f")


class Series(NamedTuple):
    """A line: its name, and its points from left to right."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Bar(NamedTuple):
    """A bar on a lane, from `start` to `stop`."""

    start: float
    stop: float
    colour: str
    told: str


def lines(series: Sequence[Series], across: str, up: str) -> str:
    """Lines over one pair of axes; `across` and `up` say what these are."""
    xs, ys = [x for s in series for x in s.x], [y for s in series for y in s.y if math.isfinite(y)]
    if not ys:
        return "<p>No finite number to draw.</p>"
    (x0, x1), marks = _ends(xs), ticks(min(ys), max(ys))
    y0, y1 = min(marks[0], min(ys)), max(marks[-1], max(ys))

    def place(x: float, y: float) -> str:
        return f"{_scaled(x, x0, x1, LEFT, WIDTH - RIGHT):.1f},{_scaled(y, y0, y1, HEIGHT - BOTTOM, HEAD):.1f}"

    out = [*_grid(marks, y0, y1), *_scale(x0, x1, HEIGHT - BOTTOM)]
    for i, s in enumerate(series):
        step = max(1, len(s.x) // POINTS)
        points = [place(x, y) for x, y in zip(s.x[::step], s.y[::step]) if math.isfinite(y)]
        shape = f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.6"/>'
        dot = points[0].split(",")
        out.append(shape if len(points) > 1 else f'<circle cx="{dot[0]}" cy="{dot[1]}" r="3" fill="{COLOURS[i]}"/>')
    out.append(_text(WIDTH - RIGHT, HEIGHT - 6, across, "end"))
    named = [(s.name, COLOURS[i]) for i, s in enumerate(series)] if len(series) > 1 else []
    return legend(named) + svg(HEIGHT, [*out, _text(4, 12, up, "start")], f"{up} over {across}")


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], start: float, stop: float, across: str) -> str:
    """Bars on named lanes over one axis."""
    high, gap = 20, 6
    left = max((len(name) for name, _ in rows), default=0) * LETTER + 16
    bottom = TOP + len(rows) * (high + gap)
    out = [*_scale(start, stop, bottom, left)]
    for i, (name, spans) in enumerate(rows):
        y = TOP + i * (high + gap)
        out.append(_text(left - 8, y + high - 6, name, "end"))
        out.append(f'<rect x="{left}" y="{y}" width="{WIDTH - RIGHT - left}" height="{high}" class="lane"/>')
        for s in spans:
            a, b = (_scaled(t, start, stop, left, WIDTH - RIGHT) for t in (s.start, s.stop))
            out.append(
                f'<rect x="{a:.2f}" y="{y}" width="{max(0.3, b - a):.2f}" height="{high}" fill="{s.colour}">'
                f"<title>{escape(s.told)}</title></rect>"
            )
    out.append(_text(WIDTH - RIGHT, bottom + 34, across, "end"))
    return svg(bottom + BOTTOM, out, across)


def bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Bars from the left, one a row, each with its value behind it."""
    high, gap = 16, 5
    left = min(360.0, max(len(name) for name, _ in rows) * LETTER + 16)
    longest = max(value for _, value in rows) or 1.0
    room = WIDTH - RIGHT - left - 90  # for the value behind the longest
    out = []
    for i, (name, value) in enumerate(rows):
        y, wide = TOP + i * (high + gap), room * value / longest
        out.append(_text(left - 8, y + high - 4, _cut(name, left - 16), "end", name))
        out.append(f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{high}" fill="{COLOURS[0]}"/>')
        out.append(_text(left + wide + 6, y + high - 4, f"{value:.4g} {unit}", "start"))
    return svg(TOP + len(rows) * (high + gap) + 4, out, unit)


def legend(named: Sequence[tuple[str, str]]) -> str:
    """Names with their colours, above a picture."""
    marks = (f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in named)
    return f'<p class="legend">{"".join(marks)}</p>' if named else ""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that reach over low … high."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.floor(low / step)
    return [n * step for n in range(first, math.ceil(high / step) + 1)]


def number(value: float) -> str:
    """A number as an axis shows it."""
    if value and abs(value) >= 1e4:
        power = min(4, int(math.log10(abs(value))) // 3)
        return f"{value / 1000**power:.4g}{' kMGT'[power]}"
    return f"{value:.4g}"


def svg(height: float, inside: Sequence[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(inside) + "</svg>"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _scaled(x: float, low: float, high: float, to_low: float, to_high: float) -> float:
    return to_low + (x - low) / ((high - low) or 1.0) * (to_high - to_low)


def _grid(marks: Sequence[float], low: float, high: float) -> list[str]:
    out = []
    for mark in marks:
        y = _scaled(mark, low, high, HEIGHT - BOTTOM, HEAD)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(_text(LEFT - 6, y + 4, number(mark), "end"))
    return out


def _scale(low: float, high: float, y: float, left: float = LEFT) -> list[str]:
    """Ticks below an axis; those whose label would touch the one before are left out."""
    out = [f'<line x1="{left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="axis"/>']
    taken = -math.inf
    for mark in ticks(low, high, 8):
        x, wide = _scaled(mark, low, high, left, WIDTH - RIGHT), len(number(mark)) * LETTER
        if low <= mark <= high and x - wide / 2 > taken:
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" class="axis"/>')
            out.append(_text(x, y + 17, number(mark), "middle"))
            taken = x + wide / 2 + 6
    return out


def _cut(text: str, room: float) -> str:
    letters = int(room / LETTER + 1e-6)  # a label whose room was made for it is not cut by rounding
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _text(x: float, y: float, text: str, anchor: str, told: str = "") -> str:
    title = f"<title>{escape(told)}</title>" if told else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{title}{escape(text)}</text>'
