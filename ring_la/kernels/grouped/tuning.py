"""Tile shapes of the Triton kernels, as data.

Chosen by `ring-la bench grouped --tune`, which times the candidates below and prints this table anew.
A line holds for groups of up to so many rows on average; the first that fits decides. Nothing is tuned at run time.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Tiles(NamedTuple):
    """How a product is cut. For a rows product `m` counts rows of C and `k` the columns of A summed over; for an
    outer product `m` × `n` is a tile of one C[g] and `k` the rows summed over in a step."""

    m: int
    n: int
    k: int
    warps: int = 8
    stages: int = 3
    flatten: bool = False  # one loop over tiles and steps: the next tile's loads start before this one's store
    per_sm: int = 1  # programs a multiprocessor; 0: one program a tile, dealt out by the hardware
    band: int = 8  # row tiles walked together, for L2


#: Rows products with B stored by rows ("rows") or by columns ("rows_t", as in a gradient), and outer products.
HOPPER = {
    "rows": (
        (256, Tiles(128, 256, 64, flatten=True)),
        (1024, Tiles(128, 256, 64, stages=4, flatten=True)),
        (math.inf, Tiles(128, 256, 64, flatten=True)),
    ),
    "rows_t": (
        (48, Tiles(64, 256, 64, warps=4, stages=4, flatten=True)),
        (256, Tiles(128, 256, 64, flatten=True)),
        (math.inf, Tiles(128, 256, 64, stages=4, flatten=True)),
    ),
    "outer": (
        (48, Tiles(128, 128, 32, warps=4, stages=4, per_sm=2)),
        (256, Tiles(128, 128, 64, warps=4, per_sm=2)),
        (math.inf, Tiles(128, 128, 32, warps=4, stages=4, per_sm=2)),
    ),
}  # fmt: skip

#: Without descriptors (other GPUs, operands that are not aligned), and fp32, which multiplies as 3×TF32.
POINTERS = Tiles(128, 128, 32, warps=8, stages=3)
FP32 = Tiles(64, 64, 32, warps=4, stages=2, per_sm=2)

#: What --tune tries.
CANDIDATES = {
    "rows": (
        Tiles(128, 256, 64, warps=8, stages=3, flatten=True),
        Tiles(128, 256, 64, warps=8, stages=4, flatten=True),
        Tiles(128, 256, 64, warps=8, stages=4),
        Tiles(256, 128, 64, warps=8, stages=4, flatten=True),
        Tiles(128, 128, 64, warps=8, stages=3, per_sm=2),
        Tiles(64, 256, 64, warps=4, stages=4, flatten=True),
        Tiles(64, 128, 64, warps=4, stages=4, per_sm=2),
        Tiles(64, 128, 128, warps=4, stages=3, flatten=True),
    ),
    "outer": (
        Tiles(128, 256, 64, warps=8, stages=3),
        Tiles(128, 256, 64, warps=8, stages=4),
        Tiles(128, 256, 64, warps=8, stages=4, per_sm=0),
        Tiles(256, 128, 64, warps=8, stages=4),
        Tiles(128, 128, 64, warps=8, stages=3, per_sm=2),
        Tiles(128, 128, 64, warps=8, stages=3, per_sm=0),
        Tiles(128, 128, 64, warps=4, stages=3, per_sm=2),
        Tiles(128, 128, 32, warps=4, stages=4, per_sm=2),
    ),
}
CANDIDATES["rows_t"] = CANDIDATES["rows"]


def tiles_for(kind: str, rows_per_group: int) -> Tiles:
    """The tiles of a descriptor kernel: `kind` is "rows", "rows_t" or "outer"."""
    return next(tiles for upto, tiles in HOPPER[kind] if rows_per_group <= upto)
