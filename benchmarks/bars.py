"""Bars side by side in matplotlib, whose labels keep out of each other's way and of the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDEST = 0.28
"""Of a bar, as a share of a group's room: two bars alone do not fill it."""
FEWEST = 5
"""Groups that a panel has room for at least: one alone does not fill it either."""
LETTER = 0.066
"""Inches of a letter at the size of labels, with the space between two labels."""


def grouped_bars(axis: Any, labels: Sequence[str], heights: Mapping[str, Sequence[float | None]], colours: Any) -> None:
    """A group of bars over each label, centred, without a gap where an arm has no figure.

    Args:
        heights: of each arm, one for each label; None: it has none there. colours: by arm.
    """
    for c in range(len(labels)):
        here = [(arm, values[c]) for arm, values in heights.items() if values[c] is not None]
        width = min(WIDEST, 0.84 / max(1, len(here)))
        for i, (arm, height) in enumerate(here):
            axis.bar(c + (i - (len(here) - 1) / 2) * width, height, width * 0.94, color=colours[arm], label=arm)
    room = max(len(labels), FEWEST)
    inches = axis.figure.get_size_inches()[0] / axis.get_subplotspec().get_gridspec().ncols * 0.93 / room
    wide = [LETTER * max(map(len, label.split("\n"))) for label in labels]
    crowded = any((a + b) / 2 > inches for a, b in zip(wide, wide[1:]))
    turned = dict(rotation=25, ha="right", rotation_mode="anchor") if crowded else {}
    axis.set_xticks(range(len(labels)), labels, fontsize=8, **turned)
    middle = (len(labels) - 1) / 2
    axis.set_xlim(middle - room / 2, middle + room / 2)
    axis.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Any, title: str) -> None:
    """A title and one legend for all panels, in a room of their own above them, in a figure of constrained layout."""
    named: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            named.setdefault(name, handle)
    keywords = dict(loc="outside upper center", ncols=min(8, len(named)), frameon=False)
    figure.legend(named.values(), named.keys(), title=title, **keywords)
