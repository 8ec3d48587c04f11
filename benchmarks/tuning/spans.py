"""Time launch settings of the kernels of spans beside the general ones: `python -m benchmarks.tuning.spans --out FILE`.

Packed documents, a window and one causal sequence of one GPU, bf16. Every setting is compiled first, in threads; then
all of a pass take turns, several launches at a time, and are compared with the general kernel's results. Medians, ms;
prints the fastest of each pass and case.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.attention.bench import document_offsets, share_of_scores
from benchmarks.errors import worst_error
from benchmarks.options import names, need_gpus
from benchmarks.rows import machine, save
from benchmarks.timing import medians
from ring_la.softmax.backends import BACKENDS
from ring_la.softmax.backends.triton import kernels, launch, span_kernels, span_launch, table
from ring_la.softmax.backends.triton.table import TileSettings as Tiling
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Partial, row_sums
from ring_la.softmax.scores import Scores

GRID = {
    "forward": [
        Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 3), Tiling(128, 32, 4, 4), Tiling(64, 64, 4, 2),
        Tiling(64, 128, 4, 2), Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 3), Tiling(128, 128, 8, 2),
    ],
    "keys": [
        Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 64, 4, 3), Tiling(64, 64, 8, 2), Tiling(64, 128, 8, 2),
        Tiling(32, 128, 8, 2), Tiling(32, 128, 8, 3),
    ],
    "queries": [
        Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3), Tiling(64, 32, 4, 3), Tiling(64, 32, 4, 4), Tiling(128, 32, 8, 3),
        Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 3), Tiling(64, 128, 4, 2),
    ],
}  # fmt: skip
WIDE = {
    "forward": [
        Tiling(128, 64, 8, 2), Tiling(64, 64, 4, 2), Tiling(128, 32, 8, 2), Tiling(128, 32, 8, 3), Tiling(64, 32, 4, 3),
        Tiling(64, 64, 8, 2),
    ],
    "keys": [
        Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(64, 64, 8, 2), Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 3),
        Tiling(64, 64, 8, 1),
    ],
    "queries": [
        Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 3), Tiling(128, 32, 8, 2), Tiling(64, 64, 8, 2),
        Tiling(128, 64, 8, 1),
    ],
}  # fmt: skip
"""Of heads of 256 channels."""
TABLES = {"forward": "FORWARD", "keys": "BACKWARD_KEYS", "queries": "BACKWARD_QUERIES"}
CASES = {
    "packed": (32768, "log", -1), "packed tail": (32768, "tail", -1), "window 4096": (16384, "", 4096),
    "causal": (16384, "", -1),
}  # fmt: skip
PRODUCTS = {"forward": 4, "keys": 8, "queries": 6}
REPEATS, ROUNDS = 3, 3
Pass = Callable[[], list[Tensor]]


class Case:
    """One case's tensors, and its passes by either set of kernels."""

    def __init__(self, name: str, heads: int, width: int, T: int | None = None) -> None:
        length, documents, window = CASES[name]
        self.T = T or length
        cu = document_offsets(self.T, 4, tail=documents == "tail") if documents else [0, self.T]
        self.pairs = share_of_scores(cu, window) * self.T**2
        torch.manual_seed(0)
        made = (torch.randn(1, self.T, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.q, self.k, self.v, self.do = made
        tokens = Tokens.whole(self.T, self.q.device, cu)
        self.scores = Scores(width**-0.5, left=window if window >= 0 else None, right=0)
        self.pair = Pair(tokens, tokens, self.scores.reach)
        out = Partial(self.q.shape, self.q.dtype, self.q.device)
        BACKENDS["triton"].forward(self.q, self.k, self.v, self.scores, self.pair, out)
        o, self.lse = out.result()
        self.delta = row_sums(self.do, o, None)

    def general(self, which: str) -> list[Tensor]:
        tensors, given, results = self._tensors(which)
        call = launch.General(self.scores, self.pair, *tensors)
        over = call.over_keys if which == "keys" else call.over_queries
        kernel = {"forward": kernels.forward, "keys": kernels.backward_keys, "queries": kernels.backward_queries}[which]
        over(
            kernel,
            getattr(table, TABLES[which]),
            self.q,
            self.k,
            self.v,
            *given,
            *results,
            *results[: which != "forward"],
        )
        return results

    def by_spans(self, which: str, how: Tiling) -> list[Tensor]:
        tensors, given, results = self._tensors(which)
        call = span_launch.OfSpans(self.scores, self.pair, *tensors)
        settings = dict.fromkeys((64, 128, 256), how)
        if which == "keys":
            call.over_keys(span_kernels.backward_keys, settings, *given[1:], *results, results[0])
        else:
            kernel = span_kernels.forward if which == "forward" else span_kernels.backward_queries
            call.over_queries(kernel, settings, *given, *results, *results[: which == "queries"])
        return results

    def _tensors(self, which: str) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
        """(q, k, v and o or its gradient; what else a pass takes; where its results go)."""
        q = self.q
        if which == "forward":
            o = torch.empty_like(q)
            return (q, self.k, self.v, o), [], [o, torch.empty_like(self.lse)]
        results = [torch.empty_like(self.k), torch.empty_like(self.v)] if which == "keys" else [torch.empty_like(q)]
        return (q, self.k, self.v, self.do), [self.do, self.lse, self.delta], results


def passes(case: Case, which: str) -> dict[str, Pass]:
    """The general kernel, and those of spans by setting."""
    out: dict[str, Pass] = {"general": functools.partial(case.general, which)}
    grid = GRID if case.q.shape[-1] <= 128 else WIDE
    return out | {str(tuple(how)): functools.partial(case.by_spans, which, how) for how in grid[which]}


def compile_all(cases: list[Case]) -> int:
    device, todo = torch.cuda.current_device(), [f for c in cases for w in GRID for f in passes(c, w).values()]

    def run(one: Pass) -> str:
        torch.cuda.set_device(device)
        try:
            one()
        except Exception as error:  # too much shared memory, or what the compiler cannot do: it says so again below
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(16) as pool:
        failed = sum(bool(x) for x in pool.map(run, todo))
    torch.cuda.synchronize()
    return failed


def measure(case: Case, which: str, name: str, heads: int, width: int) -> list[dict]:
    todo, far = passes(case, which), {}
    truth = todo["general"]()
    for how, one in [*todo.items()]:
        try:
            far[how] = worst_error(one(), truth)
        except Exception as error:
            print(f"{name} {which} {how}: {type(error).__name__} {str(error)[:120]}", flush=True)
            del todo[how]
    flops = PRODUCTS[which] * heads * width * case.pairs
    rows = [
        dict(case=name, which=which, how=how, ms=ms, tflops=flops / ms / 1e9, apart=far[how])
        for how, ms in medians(todo, ROUNDS, REPEATS, warm=0).items()
    ]
    for r in sorted(rows, key=lambda r: r["ms"]):
        said = f"{r['ms']:7.3f} ms {r['tflops']:4.0f} TFLOP/s   apart {r['apart']:.1e}"
        print(f"{name:12} {which:8} {r['how']:20} {said}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--cases", type=names(CASES), default=",".join(CASES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/spans_tuning.json"))
    args = parser.parse_args()
    need_gpus(parser)
    start, rows = time.time(), []
    failed = compile_all([Case(name, args.heads, args.width, T=1024) for name in args.cases])
    print(f"compiled in {time.time() - start:.0f} s, {failed} failed", flush=True)
    for name in args.cases:
        case = Case(name, args.heads, args.width)
        for which in GRID:
            rows += measure(case, which, name, args.heads, args.width)
            save(args.out, machine() | dict(rows=rows))


if __name__ == "__main__":
    main()
