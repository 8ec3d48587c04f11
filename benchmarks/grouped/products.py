"""The products of ``ring-la bench grouped``: their operands, sizes and names; and the clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ring_la.kernels.grouped import GroupedProduct

KINDS = ("rows", "rows_t", "outer")
ROUNDS, INNER, WARM = 5, 8, 2


def group_sizes(kind: str, rows: int, groups: int) -> list[int]:
    """Sizes that sum to `rows`: all alike, or Zipf's law (the i-th largest ∝ 1/i) in a shuffled order."""
    if kind == "balanced":
        return [rows // groups + (g < rows % groups) for g in range(groups)]
    generator = torch.Generator().manual_seed(groups)
    weights = (1 / torch.arange(1, groups + 1, dtype=torch.float64))[torch.randperm(groups, generator=generator)]
    ends = (weights.cumsum(0) / weights.sum() * rows).round().long().tolist()
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def call_of(kind: str, a: Tensor, b: Tensor, dc: Tensor, sizes: Tensor) -> GroupedProduct:
    return {
        "rows": GroupedProduct("rows", a, b, sizes),
        "rows_t": GroupedProduct("rows", dc, b.mT, sizes),
        "outer": GroupedProduct("outer", a, dc, sizes),
    }[kind]


def operands(rows: int, groups: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    return make(rows, k), make(groups, k, n), make(rows, n)


def times(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS, inner: int = INNER) -> dict[str, float]:
    """Milliseconds a call: the median of rounds in which the functions take turns. Nothing waits for the GPU between
    them, as in `timing.medians`: these products are short, and hosts stay ahead."""
    for function in functions.values():
        for _ in range(WARM):
            function()
    marks: dict[str, list] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                function()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) / inner for s, e in pairs) for name, pairs in marks.items()}
