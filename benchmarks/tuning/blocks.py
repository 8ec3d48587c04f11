"""Tiles of the kernels for chosen blocks of keys, timed one beside the other: `python -m benchmarks.tuning.blocks`.

A line of JSON a tile (rows, keys, warps, stages) of `ring_la.softmax.backends.triton.chosen_blocks`, bf16, ms: of
FORWARD forward, of QUERIES (dq) and KEYS (dk, dv) of both passes; the case is "blocks" of benchmarks.chosen. `error`:
of what the tile makes, beside the first tile's, since a compiler's fault may depend on the tile. First come the kernels
of a call by the profiler, ms. --limit: seconds after which no tile is begun.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ring_la.softmax.backends.triton import chosen_blocks
from ring_la.softmax.backends.triton.table import TileSettings

from ..chosen import Case, blocks, timed
from ..errors import worst_error
from ..options import need_gpus
from ..rows import Rows, machine, reason
from ..timing import kernels

TILES: dict[str, tuple[TileSettings, ...]] = {
    "FORWARD": (
        TileSettings(128, 64, 8, 3),
        TileSettings(64, 64, 4, 2),
        TileSettings(64, 64, 4, 3),
        TileSettings(128, 64, 8, 2),
    ),
    "QUERIES": (TileSettings(64, 64, 4, 2), TileSettings(128, 64, 8, 2), TileSettings(64, 32, 4, 3)),
    "KEYS": (TileSettings(64, 64, 4, 2), TileSettings(32, 64, 4, 3), TileSettings(32, 64, 4, 2)),
}
Row = dict[str, Any]


def results(case: Case) -> list[Tensor]:
    """o and the gradients."""
    o = case.arms["triton_blocks"]()(*case.x)
    return [o.detach(), *torch.autograd.grad(o, case.x, torch.ones_like(o))]


def longest(case: Case) -> Row:
    """ms of the longest kernels of both passes."""
    results(case)
    return dict(kernels={name: round(us / 1e3, 3) for name, _, us in kernels(lambda: results(case))[:16]})


def tiles(case: Case, names: list[str]) -> Iterator[Row]:
    want: list[Tensor] = []
    for name in names:
        for tile in TILES[name]:
            row: Row = dict(kernel=name, tile=tuple(tile))
            try:
                with patch.object(chosen_blocks, name, tile):
                    got = results(case)
                    want = want or got
                    row["error"] = worst_error(got, want)
                    row |= timed(case.arms["triton_blocks"](), case, back=name != "FORWARD")
            except Exception as error:  # what does not fit a multiprocessor is a line, too
                row["failed"] = reason(error)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kernels", nargs="+", default=list(TILES), choices=TILES)
    parser.add_argument("--limit", type=float, default=60, help="seconds after which no tile is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(parser)
    began, found = time.monotonic(), Rows(args.out, **machine())
    case = blocks(args.tokens, 64, 4, 128, 32, 64, ["triton_blocks"])
    for row in chain(map(longest, [case]), tiles(case, args.kernels)):
        found.add(row)
        if time.monotonic() - began > args.limit:
            break


if __name__ == "__main__":
    main()
