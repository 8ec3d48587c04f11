"""A token over keys in columns, by products or our kernel: `python -m benchmarks.tuning.columns --out FILE [--arms]`.

bf16, CUDA graphs, µs a call beside the bytes' time at 4.1 TB/s; the error of o against fp64. --arms: the kernel's other
tiles and waves, too. Sequences x tokens, heads of queries and of keys, channels, rotary channels beside latents.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from benchmarks.rows import Rows
from ring_la.keystore import decode_kernel
from ring_la.keystore.columns import Columns, by_products

from ..errors import relative_error
from ..ops.measure import graph_times
from .products import BANDWIDTH

SHAPES = [
    (1, 65536, 20, 4, 128, 0), (1, 262144, 20, 4, 128, 0), (8, 65536, 20, 4, 128, 0), (8, 262144, 20, 4, 128, 0),
    (64, 16384, 20, 4, 128, 0), (1, 65536, 16, 2, 256, 0), (8, 16384, 64, 1, 128, 0), (1, 65536, 16, 1, 512, 64),
    (1, 65536, 128, 1, 512, 64), (8, 32768, 128, 1, 512, 64),
]  # fmt: skip
TILES = [(q, k, warps, 2 if k == 64 else 3) for q in (16, 32) for k in (32, 64) for warps in (4, 8)]


def draw(N: int, tokens: int, H: int, heads: int, K: int, R: int) -> tuple[Tensor, Columns]:
    """Queries and columns, an eighth of which no token sees."""
    columns = tokens + tokens // 8

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    k, v = some(N, heads, columns, K), None if R else some(N, heads, columns, K)
    begin = torch.zeros(N, dtype=torch.int64, device="cuda")
    more = (some(N, H, R), some(N, heads, columns, R)) if R else (None, None)
    return some(N, H, K), Columns(k, v, begin, begin + tokens, *more)


def off(q: Tensor, keys: Columns, scale: float) -> float:
    """Of the first sequence."""
    first = Columns(*(None if x is None else x[:1] for x in keys))
    wide = Columns(*(x.double() if x is not None and x.is_floating_point() else x for x in first))
    want = by_products(q[:1].double(), wide, scale, 0.0)[0]
    return relative_error(decode_kernel.decode_columns(q[:1], first, scale, 0.0)[0], want)


def microseconds(call: Callable[[], None]) -> float | str:
    try:
        call()  # compiled here
    except Exception as e:  # a tile may want more than there is
        return type(e).__name__
    times = graph_times(call, "both")
    return round(1e3 * times["graph_both"], 1) if "graph_both" in times else times["graph_both_failed"]


def rows(arms: bool) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        N, tokens, _, heads, K, R = shape
        q, keys = draw(*shape)
        scale = K**-0.5

        def kernel(q: Tensor = q, keys: Columns = keys, scale: float = scale) -> None:
            decode_kernel.decode_columns(q, keys, scale, 0.0)

        def products(q: Tensor = q, keys: Columns = keys, scale: float = scale) -> None:
            by_products(q, keys, scale, 0.0)

        seconds = 2 * N * heads * tokens * ((K if R else 2 * K) + R) / BANDWIDTH
        row = {"shape": shape, "bytes, us": round(1e6 * seconds, 1), "error": off(q, keys, scale)}
        row |= {"products, us": microseconds(products), "kernel, us": microseconds(kernel)}
        for tile, waves in itertools.product(TILES, (1, 2, 4)) if arms else ():
            with mock.patch.multiple(decode_kernel, _tile=lambda *_, tile=tile: tile, WAVES=waves):
                row[f"{tile}, {waves} waves"] = microseconds(kernel)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    need_gpus(parser)
    found = Rows(options.out)
    for row in rows(options.arms):
        found.add(row)


if __name__ == "__main__":
    main()
