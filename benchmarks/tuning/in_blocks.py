"""Time launch settings of deterministic softmax attention on a GPU: `python -m benchmarks.tuning.in_blocks`.

hybrid_1b's heads (20 of 128 channels, 4 key heads), one causal document, bf16; ms of forward, dq, and dk and dv. A tile
of the far side is a block: 64 or 128 rows, or what a multiple of a document's borders allows.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.timing import median
from benchmarks.tuning.fixed import INNER, ROUNDS
from ring_la.softmax.backends.backend import QueryRows
from ring_la.softmax.backends.triton import CanonicalTriton, table
from ring_la.softmax.backends.triton.table import TileSettings
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Partial
from ring_la.softmax.scores import Scores

SETTINGS = {
    "SPANS_FORWARD": ((128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)),
    "SPANS_QUERIES": ((128, 64, 8, 3), (64, 64, 4, 3)),
    "SPANS_KEYS": ((64, 64, 4, 2), (128, 64, 8, 2)),
}
"""Queries and keys of a tile, warps and stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--only", default="", help="FORWARD, QUERIES or KEYS")
    options = parser.parse_args()
    T, device, backend = options.tokens, torch.device("cuda"), CanonicalTriton()
    q, do = (torch.randn(1, T, 20, 128, device=device).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, T, 4, 128, device=device).bfloat16() for _ in range(2))
    tokens, scores = Tokens.whole(T, device), Scores(128**-0.5, right=0)
    pair, out = Pair(tokens, tokens, scores.reach), Partial(q.shape, q.dtype, device)
    backend.forward(q, k, v, scores, pair, out)
    o, lse = out.result()
    x = QueryRows(q, o, do, lse, backend.row_sums(do, o, None, tokens))
    calls = {
        "SPANS_FORWARD": lambda: backend.forward(q, k, v, scores, pair, Partial(q.shape, q.dtype, device)),
        "SPANS_QUERIES": lambda: backend.query_gradients(x, k, v, scores, pair),
        "SPANS_KEYS": lambda: backend.key_gradients(x, k, v, scores, pair),
    }
    for name, call in calls.items():
        if options.only not in name:
            continue
        tiles = getattr(table, name)
        chosen = tiles[128]
        for how in SETTINGS[name]:
            tiles[128] = TileSettings(*how)
            try:
                print(f"{name:17} {how} {median(call, ROUNDS, INNER):.3f}", flush=True)
            except Exception as error:
                print(f"{name:17} {how} {type(error).__name__}", flush=True)
        tiles[128] = chosen


if __name__ == "__main__":
    main()
