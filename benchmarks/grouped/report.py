"""What ``ring-la bench grouped`` found: a table and a picture."""

from __future__ import annotations

import pathlib

from ..bars import grouped_bars, legend_above
from .products import KINDS


def report(lines: list[dict]) -> None:
    names = ("dense", "loop", "torch", "cutlass", "triton", "auto")
    print(f"\n{'product':8}{'G':>4} {'sizes':9}" + "".join(f"{name:>9}" for name in names), end="")
    print(f"{'TFLOP/s':>9}{'of best':>9}{'of dense':>9}  auto is")
    for line in lines:
        cells = "".join(f"{line['ms'][name]:9.3f}" if name in line["ms"] else f"{'-':>9}" for name in names)
        print(f"{line['kind']:8}{line['G']:4} {line['sizes']:9}{cells}{line['tflops']['auto']:9.0f}", end="")
        print(f"{line['of best other']:9.2f}{line['of dense']:9.2f}  {line['auto is']}")
    for kind in KINDS:  # what preference.py should say
        cells = [line for line in lines if line["kind"] == kind and {"torch", "triton"} <= line["ms"].keys()]
        ratios = (f"G={x['G']} {x['sizes']} {x['ms']['torch'] / x['ms']['triton']:.2f}" for x in cells)
        print(f"time of torch / time of triton, {kind}: " + ", ".join(ratios))


def picture(lines: list[dict], path: pathlib.Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("dense", "loop", "torch", "cutlass", "triton", "auto")
    colours = ("#bbbbbb", "#ddaa33", "#bb5566", "#7733aa", "#4477aa", "#004488")
    figure, axes = plt.subplots(2, 2, figsize=(13, 7), sharey=True, layout="constrained")
    for axis, kind in zip(axes.flat, (*KINDS, "train"), strict=True):
        cells = [line for line in lines if line["kind"] == kind]
        speeds = {name: [line["tflops"].get(name) for line in cells] for name in names}
        grouped_bars(axis, [f"G={line['G']}\n{line['sizes']}" for line in cells], speeds, dict(zip(names, colours)))
        axis.set_title(kind, fontsize=10)
    legend_above(figure, title)
    axes[0, 0].set_ylabel("TFLOP/s")
    figure.savefig(path, dpi=130)
