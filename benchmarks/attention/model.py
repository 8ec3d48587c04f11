"""What a ring's blocks should cost by counting, without a GPU: `python -m benchmarks.attention.model [--cases …]`.

Every rank's blocks, as `benchmarks.attention.blocks` times them, as programs of the Triton kernel's forward pass: each
takes a fixed time and one for each of its tiles, more for those that need their mask. They start in the order of the
launch on so many places (two a multiprocessor), and a block ends with its last program; parts are put together in a
pass over memory, or in place. The times were fitted to an H200 (32 heads of 128, `benchmarks.attention.kernels`).
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable

import torch

from ring_la.layout import KINDS
from ring_la.softmax.backends.triton import plan, table
from ring_la.softmax.geometry import Pair, Reach, Tokens

from ..options import counts, names
from .blocks import CASES, ranks_of

PLACES, HEADS = 264, 32
TILE, PROGRAM, MASKED = 2.82e-3, 6e-3, 1.5
"""ms of a tile of 128 × 64 beside another program, ms of a program beside its tiles, and what a masked tile takes over
another."""
BYTES = 128 * 2 * HEADS / 4e9
"""ms to read or write a row of o of all heads."""


def end(durations: Iterable[float]) -> float:
    """When the last of programs ends that start in this order."""
    places = [0.0] * PLACES
    for ms in durations:
        heapq.heapreplace(places, places[0] + ms)
    return max(places)


def block(pair: Pair) -> tuple[float, float, float, int]:
    """ms of one block: if its work were even, head by head, and the dearest tiles of all heads first; and its rows."""
    met = plan.trimmed(pair)
    if met is None:
        return 0.0, 0.0, 0.0, 0
    how = table.FORWARD[128]
    found = plan.of_queries(met.pair, how.rows, how.keys).counts.tolist()
    each = [PROGRAM + TILE * (whole + MASKED * (several - whole)) for whole, several in found]
    by_head = end(ms for _ in range(HEADS) for ms in each)
    dearest = end(ms for ms in sorted(each, reverse=True) for _ in range(HEADS))
    return sum(each) * HEADS / PLACES, by_head, dearest, len(met.pair.rows)


def rank(pairs: list[Pair]) -> tuple[float, float, float]:
    """The same of all blocks of a rank; head by head with the passes that put parts together."""
    even, by_head, dearest, rows = (sum(x) for x in zip(*map(block, pairs)))
    first = len(pairs[0].rows)
    merge = (2 * first + rows) * BYTES if len(pairs) > 1 else 0.0  # every part is read, o is written
    return even, by_head + merge, dearest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="a rank")
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--cases", type=names(CASES), default="packed,packed tail,window 4096")
    parser.add_argument("--kinds", type=names(KINDS), default="zigzag,balanced")
    args = parser.parse_args()
    cpu = torch.device("cpu")
    for case in args.cases:
        for P in args.ranks:
            for kind in args.kinds if CASES[case][0] else args.kinds[:1]:
                ranks, share = ranks_of(case, args.tokens, P, kind, cpu)
                keys = max(128, int(args.tokens * P * share) // 128 * 128)
                whole = Pair(Tokens.whole(args.tokens, cpu), Tokens.whole(keys, cpu), Reach())
                bound = block(whole)[1]
                said = (f"{100 * bound / max(x):3.0f} %" for x in zip(*map(rank, ranks)))
                print(
                    f"{case:12} × {P} {kind:9} bound {bound:5.2f} ms   even, head by head, in place", *said, flush=True
                )


if __name__ == "__main__":
    main()
