"""Products of one row with weights, by cuBLAS or our kernel: `python -m benchmarks.tuning.products --out FILE`.

bf16, CUDA graphs over several copies of the weights, so that none is in a cache; µs a call beside the weights' time at
4.1 TB/s, of each tile (rows, channels, warps). Shapes of examples/configs/hybrid_1b.yaml; what cuBLAS
is timed with is the products alone, without the norm, gate or sum that ours have.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.options import need_gpus
from benchmarks.rows import Rows
from benchmarks.timing import elapsed
from ring_la.kernels.tokens.products_kernel import products

BANDWIDTH, CACHED = 4.1e12, 400 << 20
"""Bytes a second of an H200; bytes that go through its caches in a graph."""
SHAPES = {
    "in": (2560, (7680, 20, 20, 2560), dict(norm=True)),
    "out": (2560, (2560,), dict(added=True)),
    "up": (2560, (13696,), dict(norm=True, swiglu=True)),
    "down": (6848, (2560,), dict(added=True)),
}
"""Channels, rows of the weights, and what goes with the product."""
TILES = [(4, 512, 4), (8, 512, 4), (2, 1024, 4), (2, 512, 2), (1, 1024, 2), (2, 1024, 2), (1, 1024, 1), (1, 2048, 4)]
AFTER = [(4, 512, 4), (2, 1024, 4)]
"""Tiles that are timed with every launch begun after the one before has ended, too."""


def microseconds(calls: list, rounds: int = 20) -> float:
    """Of one of the calls, all of which are one graph. The first one runs before, on the stream that the graph is
    captured on: there cuBLAS has its workspace then."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    return 1e3 * elapsed(graph.replay, rounds) / len(calls)


def row(name: str) -> dict[str, object]:
    """Times of a shape."""
    D, sizes, how = SHAPES[name]
    each = 2 * D * sum(sizes)
    copies = [
        [torch.randn(n, D, device="cuda", dtype=torch.bfloat16) / D**0.5 for n in sizes]
        for _ in range(-(-CACHED // each))
    ]
    x, norm = torch.randn(2, 1, D, device="cuda", dtype=torch.bfloat16)
    options: dict = {"swiglu": how.get("swiglu", False), "norm": norm[0] if how.get("norm") else None}
    if how.get("added"):
        options["added"] = torch.randn(1, sum(sizes), device="cuda", dtype=torch.bfloat16)
    found: dict[str, object] = {"shape": name, "bytes' time": round(1e6 * each / BANDWIDTH, 2)}
    found["cuBLAS"] = round(microseconds([lambda w=w: [F.linear(x, each) for each in w] for w in copies]), 2)
    arms = [(tile, True) for tile in TILES] + [(tile, False) for tile in AFTER]
    for tile, begins in arms:
        ours = partial(products, x, tile=tile, begins=begins, **options)
        found[f"{tile}" + ("" if begins else ", after")] = round(microseconds([partial(ours, w) for w in copies]), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus(parser)
    rows = Rows(options.out)
    for name in SHAPES:
        rows.add(row(name))


if __name__ == "__main__":
    main()
