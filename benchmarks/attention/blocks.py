"""What the blocks of a ring cost without the ring: every rank's, one after the other, on one GPU.

    python -m benchmarks.attention.blocks [--ranks 2,4] [--cases packed,...] [--kinds zigzag,balanced] [--out FILE.json]

Each rank's own block and rounds, as a copied ring has them, on keys that are there already, in a CUDA graph. What is
left to the bound (one call that sees everything, with the FLOPs that a rank owes) is what tiles, launches and merges
cost, and how even the ranks are; what a real ring takes beyond the dearest rank is its exchange. Bytes are those of
keys and values that each rank receives. `general` is `triton` without its kernels of spans. `--streams 2` puts every
other round on a second stream, as `Copied` can; `--alone` times each block by itself, too.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from ring_la.layout import KINDS, Layout
from ring_la.softmax.backends import BACKENDS, AttentionBackend, QueryRows
from ring_la.softmax.backends.triton import table
from ring_la.softmax.geometry import Pair, Reach, Tokens
from ring_la.softmax.merging import Gradients, Partial, Sum, row_sums
from ring_la.softmax.scores import Scores
from ring_la.softmax.strategies.job import AttentionJob
from ring_la.softmax.strategies.schedule import Schedule, needs_of

from ..errors import worst_error
from ..options import counts, names
from ..rows import machine, save
from ..timing import graph_of, medians
from .ahead import compile_ahead
from .bench import document_offsets, share_of_scores

CASES: dict[str, tuple[str, int]] = {
    "packed": ("log", -1),
    "packed tail": ("tail", -1),
    "window 4096": ("", 4096),
    "causal": ("", -1),
}
ROUNDS = 8
TIMED = "forward", "total"
KERNELS = "general", *BACKENDS


def scores_of(case: str, D: int) -> Scores:
    window = CASES[case][1]
    return Scores(D**-0.5, left=window if window >= 0 else None, right=0)


@contextmanager
def kernel_of(name: str) -> Iterator[AttentionBackend]:
    """A kernel by name."""
    with mock.patch.dict(table.SPANS_FORWARD, clear=name == "general"):
        yield BACKENDS["triton" if name == "general" else name]


class Rank:
    """One rank's blocks.

    Args:
        pairs: its queries and the keys of each block, in turn.
        streams: 2: every other round goes on a second stream, as `Copied` has it.
    """

    def __init__(
        self,
        kernel: AttentionBackend,
        scores: Scores,
        pairs: list[Pair],
        heads: tuple[int, int],
        D: int,
        streams: int = 1,
    ) -> None:
        self.kernel, self.scores, self.pairs = kernel, scores, pairs
        self.second = torch.cuda.Stream() if streams > 1 else None
        rows, bf = len(pairs[0].rows), dict(device=pairs[0].rows.device, dtype=torch.bfloat16)
        self.q, self.do = (torch.randn(1, rows, heads[0], D, **bf) for _ in range(2))
        self.kv = [[torch.randn(1, len(p.keys), heads[1], D, **bf) for _ in range(2)] for p in pairs]

    def forward(self) -> tuple[Tensor, Tensor]:
        out = Partial(self.q.shape, self.q.dtype, self.q.device)
        other = out.like()
        for pair, (k, v), turn in self._turns():
            with turn as beside:
                self.kernel.forward(self.q, k, v, self.scores, pair, other if beside else out)
        self._meet()
        out.take(other)
        return out.result()

    def total(self) -> list[Tensor]:
        o, lse = self.forward()
        rows = QueryRows(self.q, o, self.do, lse, row_sums(self.do, o, None))
        dq, other, out = Sum.like(self.q), Sum.like(self.q), []
        for pair, (k, v), turn in self._turns():
            with turn as beside:
                grads = Gradients(other if beside else dq, Sum.like(k), Sum.like(v))
                self.kernel.backward(rows, k, v, self.scores, pair, grads)
                out += [grads.dk.result(k.dtype), grads.dv.result(v.dtype)]
        self._meet()
        dq.take(other)
        return [o, dq.result(o.dtype), *out]

    def _turns(self) -> Iterator[tuple[Pair, list[Tensor], AbstractContextManager]]:
        """Blocks, each with a context that gives a stream where it is computed beside the current one."""
        if self.second is not None:
            self.second.wait_stream(torch.cuda.current_stream())
        for n, (pair, kv) in enumerate(zip(self.pairs, self.kv)):
            beside = self.second is not None and n % 2 == 1
            yield pair, kv, _on(self.second) if beside else nullcontext()

    def _meet(self) -> None:
        if self.second is not None:
            torch.cuda.current_stream().wait_stream(self.second)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    with torch.cuda.stream(stream):
        yield stream


def ranks_of(case: str, T: int, P: int, kind: str, device: torch.device) -> tuple[list[list[Pair]], float]:
    """For each rank its blocks, and the visible pairs of all over all pairs."""
    documents, window = CASES[case]
    cu = document_offsets(T * P, 2 * P, tail=documents == "tail") if documents else [0, T * P]
    near = window if window >= 0 else None
    layout = Layout(T * P, kind, P, cu_seqlens=cu, window=near if kind == "balanced" else None)
    reach = Reach(near, 0)
    tokens = tuple(Tokens.of_ranks(layout, [r], device).fewest_runs()[0] for r in range(P))
    job = AttentionJob(BACKENDS["torch"], scores_of(case, 128), tokens, tokens)
    out = []
    for r in range(P):
        schedule = Schedule(job, needs_of(tokens, tokens, reach))
        keys = [tokens[r], *(x.keys for x in schedule.rounds(r))]
        out.append([Pair(tokens[r], k, reach) for k in keys])
    return out, share_of_scores(cu, window)


class Way(NamedTuple):
    """How blocks are computed: by which kernel, on how many streams."""

    kernel: str
    streams: int


Make = Callable[[AttentionBackend], Rank]


def timed(asked: list[tuple[str, Make]]) -> list[dict[str, float]]:
    """Milliseconds of each, by a kernel's name."""
    ranks, out = [], [dict[str, float]() for _ in asked]
    for name, make in asked:
        with kernel_of(name) as kernel:
            ranks.append(make(kernel))
    for n in TIMED:
        replays = {}
        for i, ((name, _), rank) in enumerate(zip(asked, ranks)):
            with kernel_of(name):
                replays[str(i)] = graph_of(getattr(rank, n), warm=1).replay
        for of_one, ms in zip(out, medians(replays, ROUNDS).values()):
            of_one[n] = ms
    return out


def apart(asked: list[tuple[str, Make]]) -> list[float]:
    """How far results are from the first one's."""
    truth: list[Tensor] = []
    out = []
    for name, make in asked:
        with kernel_of(name) as kernel:
            got = make(kernel).total()
        truth = truth or got
        out.append(worst_error(got, truth))
    return out


def bench(
    case: str, T: int, P: int, kind: str, ways: list[Way], heads: tuple[int, int], D: int, alone: bool
) -> list[dict]:
    """A row for each way; `alone`: with the times of each block by itself."""
    device, scores = torch.device("cuda", torch.cuda.current_device()), scores_of(case, D)
    ranks, share = ranks_of(case, T, P, kind, device)
    few = Tokens.whole(max(128, int(T * P * share) // 128 * 128), device)
    bounding = Pair(Tokens.whole(T, device), few, Reach())
    facts = dict(case=case, T=T, P=P, kind=kind, heads=heads, blocks=[len(pairs) for pairs in ranks])
    facts |= dict(received=[sum(len(p.keys) for p in pairs[1:]) * heads[1] * D * 4 for pairs in ranks])

    def rank_of(scores: Scores, pairs: list[Pair], streams: int = 1) -> Make:
        def make(kernel: AttentionBackend) -> Rank:
            torch.manual_seed(0)
            return Rank(kernel, scores, pairs, heads, D, streams)

        return make

    names = sorted({way.kernel for way in ways})
    times = []
    for pairs in ranks:
        bounds = [(name, rank_of(Scores(D**-0.5), [bounding])) for name in names]
        each = timed(bounds + [(way.kernel, rank_of(scores, pairs, way.streams)) for way in ways])
        blocks = [timed([(way.kernel, rank_of(scores, [pair])) for way in ways]) for pair in pairs if alone]
        times.append((dict(zip(names, each)), each[len(names) :], blocks))
    off = apart([(way.kernel, rank_of(scores, ranks[0], way.streams)) for way in ways])
    rows = []
    for i, way in enumerate(ways):
        row = facts | dict(kernel=way.kernel, streams=way.streams, apart=off[i])
        row |= dict(bound={n: statistics.median(bounds[way.kernel][n] for bounds, *_ in times) for n in TIMED})
        row |= dict(ranks={n: [each[i][n] for _, each, _ in times] for n in TIMED})
        row |= dict(alone=[[block[i] for block in blocks] for *_, blocks in times])
        rows.append(row | {n: max(ms) for n, ms in row["ranks"].items()})
    say(rows, 4 * heads[0] * D * T * T * P * share)
    return rows


def say(rows: list[dict], flops: float) -> None:
    """A line for each row, and what it makes of a rank's FLOPs forward."""
    for row in rows:
        row |= dict(tflops={n: times * flops / row[n] / 1e9 for n, times in dict(forward=1, total=3.5).items()})
        said = "   ".join(
            f"{n} {row[n]:7.3f} ms {row['bound'][n] / row[n]:4.0%} {row['tflops'][n]:4.0f} TFLOP/s" for n in TIMED
        )
        each = " ".join(f"{x:.2f}" for x in row["ranks"]["total"])
        where = f"{row['case']:12} {row['T']:6} × {row['P']} {row['kind']:9} {row['kernel']:13} {row['streams']}"
        print(f"{where} {said}   each {each}   apart {row['apart']:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=counts, default="16384", help="tokens a rank")
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--cases", type=names(CASES), default=",".join(CASES))
    parser.add_argument("--kinds", type=names(KINDS), default="zigzag,balanced")
    parser.add_argument("--kernels", type=names(KERNELS), default="triton")
    parser.add_argument("--streams", type=counts, default="1")
    parser.add_argument("--alone", action="store_true", help="each block by itself, too")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/attention_blocks.json"))
    args = parser.parse_args()
    need_gpus(parser)
    heads, rows = (args.heads, args.groups), []
    for name in args.kernels:
        with kernel_of(name) as kernel:
            made = compile_ahead([kernel], {scores_of(c, args.width) for c in args.cases}, heads, args.width)
            print(f"{made} passes of {name} compiled", flush=True)
    ways = [Way(name, n) for name, n in itertools.product(args.kernels, args.streams)]
    for case, T, P in itertools.product(args.cases, args.lengths, args.ranks):
        for kind in args.kinds if case != "causal" else args.kinds[:1]:
            rows += bench(case, T, P, kind, ways, heads, args.width, args.alone)
            save(args.out, machine() | dict(rows=rows))


if __name__ == "__main__":
    main()
