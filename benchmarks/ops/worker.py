"""One side of one operator in a process of its own: it compiles and checks as soon as it starts, then measures when
told to, so that many can compile at once and each is timed alone.

    python -m benchmarks.ops.worker OP SIDE SHAPE,SHAPE     commands on stdin, one JSON object a line on stdout

It says ``{"first_s": …}`` of its first forward and backward, ``{"ready": SHAPE, "errors": …}`` for each shape, then
answers each ``measure SHAPE`` with a row.
FLA keeps what it tuned by keys without the length: it is warmed with at most WARM_TOKENS tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

from ..peers import fla_tuning
from ..peers import ops as peers
from .cases import CASES, Case, Shape, floor_bytes, inputs
from .measure import TOKENS, Op, errors, given, measure, results, trains

WARM_TOKENS = 8192


def first(case: Case, op: Op, shape: Shape, device: str) -> dict[str, Any]:
    """Seconds of a forward and backward, compiling included."""
    warm = shape.short(WARM_TOKENS) if case.gates else shape._replace(T=min(shape.T, WARM_TOKENS))
    x = given(op, case, inputs(case, warm, device))
    start = time.perf_counter()
    results(op, x, trains(op))
    if device == "cuda":
        torch.cuda.synchronize()
    return {"first_s": round(time.perf_counter() - start, 2)}


def prepare(case: Case, op: Op, shape: Shape, device: str, known: dict[Shape, dict[str, float]]) -> dict[str, Any]:
    """What is timed is compiled, and its errors are known: those of one size are found once."""
    first(case, op, shape, device)
    small = shape.short(TOKENS)
    if small not in known:
        known[small] = errors(case, op, shape, device)
    return {"errors": known[small]}


def row(case: Case, op: Op, shape: Shape, device: str) -> dict[str, Any]:
    """What `measure` finds, and the bytes of the memory floor."""
    found = measure(case, op, shape, device)
    x = given(op, case, inputs(case, shape, device))
    with torch.no_grad():
        return found | {"floor_bytes": floor_bytes(case, x, op(x))}


def attempt(function, *arguments) -> dict[str, Any]:
    """A side's failure is a line of the table, and must not hide the other figures."""
    try:
        return function(*arguments)
    except Exception as e:
        return {"failed": f"{type(e).__name__}: {str(e)[-300:]}"}


def side_of(name: str, side: str) -> Op:
    if side == "fla":
        fla_tuning.few()
    return CASES[name].ours if side == "ring_la" else peers.load(side, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES, metavar="OP")
    parser.add_argument("side", help="ring_la, or the peer that is measured")
    parser.add_argument("shapes", help="comma-separated")
    args = parser.parse_args()
    name, side, shapes = args.name, args.side, args.shapes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    case, op = CASES[name], side_of(name, side)
    print(json.dumps(attempt(first, case, op, Shape.parse(shapes.split(",")[0]), device)), flush=True)
    known: dict[Shape, dict[str, float]] = {}
    for text in shapes.split(","):
        print(json.dumps({"ready": text} | attempt(prepare, case, op, Shape.parse(text), device, known)), flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    for line in sys.stdin:
        text = line.split()[1]
        print(json.dumps({"row": text} | attempt(row, case, op, Shape.parse(text), device)), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
