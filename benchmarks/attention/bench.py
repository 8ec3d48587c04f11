"""Softmax attention on a split sequence beside its peers, in one run, as shares of the single-GPU bound.

    torchrun --nproc_per_node 8 -m ring_la bench attention [--lengths 16384,4096] [--out FILE.json]

The bound is one non-causal call of a kernel with the FLOPs that a rank owes: causal attention of T·P tokens is half
of T × T·P per rank. Ours runs on cuDNN, on PyTorch's FlashAttention-2 and on the Triton kernel, or on others by name.
ring-flash-attn, yunchang, xDiT, Diffusers and fast-ulysses run where they are installed, in the cases they can do, on
each of `--peers-on` (see `benchmarks.peers.attention`).

Times are medians of CUDA events, of the slowest rank: of one call, of one in a row of 10 calls (where the host runs
ahead, as in a model), and of replays of a CUDA graph. The bound is timed in each of these ways too, taking turns with
the call that is compared with it. All devices start together, behind a sum over the ranks: when their hosts come out of
a barrier is no part of what is measured, nor of the bound. Every variant's output and gradient of q are first compared,
token by token, with those of the first one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la.cli.options import count
from ring_la.comm import TRANSPORTS
from ring_la.errors import UnsupportedError
from ring_la.layout import KINDS
from ring_la.softmax import attention
from ring_la.softmax.backends import BACKENDS
from ring_la.softmax.scores import Scores
from ring_la.softmax.strategies import STRATEGIES as WAYS
from ring_la.softmax.strategies import Copied
from ring_la.training.flops import pairs

from ..errors import relative_error
from ..options import counts, names
from ..peers.attention import Call, Peers, Wanted
from ..rows import machine, reason, save
from ..timing import largest, peak
from .ahead import compile_ahead
from .measure import Timed, bound_of, measure
from .table import table

SETTLE = 6
"""Calls of a way before it is compared."""
KERNELS = ("flash", "cudnn", "flash_attn_2", "flash_attn_4")
"""What peers may run on."""
STRATEGIES = ("ring", "all_gather", "ulysses", "auto")
STREAMS = {"auto": ("", None), "1": (", one stream", False), "2": (", two streams", True)}
"""What a row's name says of a copied ring's streams, and `Copied.two_streams`."""
CASES: dict[str, dict] = {
    "causal": dict(),
    "full": dict(causal=False),
    "gqa 32:8": dict(groups=8),
    "packed": dict(packed="log-uniform"),
    "packed tail": dict(packed="tail"),
    "window 4096": dict(window=(4096, -1)),
    "softcap 30": dict(softcap=30.0),
}


def document_offsets(total: int, unit: int, count: int = 30, tail: bool = False) -> list[int]:
    """Lengths drawn log-uniformly, or with a long tail (Pareto's, index 0.9), filling the sequence, in multiples of
    `unit` (some peers take no others)."""
    draw = random.Random(0)
    lengths = [
        draw.paretovariate(0.9) if tail else math.exp(draw.uniform(math.log(64), math.log(total))) for _ in range(count)
    ]
    cuts, acc = [0], 0.0
    for n in lengths:
        acc += n
        cuts.append(round(acc / sum(lengths) * total / unit) * unit)
    return sorted({*cuts})


def share_of_scores(cu: list[int], window: int) -> float:
    """Visible pairs over all pairs."""
    return sum(pairs(b - a, window) for a, b in zip(cu, cu[1:])) / cu[-1] ** 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=counts, default="4096,16384", help="tokens a rank, the shortest first (memory is kept)"
    )
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--width", type=count, default=128)
    parser.add_argument("--cases", type=names(CASES), default=",".join(CASES))
    parser.add_argument("--strategies", type=names(STRATEGIES), default="ring,all_gather,ulysses")
    parser.add_argument("--backends", type=names(BACKENDS), default="cudnn,flash,triton")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_attention.json"))
    parser.add_argument("--read", type=pathlib.Path, nargs="+", help="print the table of these files, measure nothing")
    parser.add_argument("--kinds", type=names(KINDS), default="zigzag,striped", help="layouts of packed documents")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs too")
    parser.add_argument(
        "--peers-on", type=names((*KERNELS, "none")), default="flash", help="kernels that peers run on, or none"
    )
    parser.add_argument("--streams", type=names(STREAMS), default="auto", help="of a copied ring: auto, 1, 2 or 1,2")
    parser.add_argument("--seconds", type=count, default=3600, help="begin no row after so many")
    parser.add_argument(
        "--transports", type=names(TRANSPORTS), default="torch,auto", help="of the ring; the others go by the last one"
    )


def run(args: argparse.Namespace) -> None:
    if args.read:
        sys.stdout.writelines(f"{line}\n" for line in table(args.read))
        return
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        got = "no CUDA device" if "LOCAL_RANK" in os.environ else "a process alone"
        raise UnsupportedError("ranks", "some that torchrun started, with a GPU each", got)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    began = time.monotonic()
    rank, P, rows, end = dist.get_rank(), dist.get_world_size(), [], began + args.seconds
    contexts = {name: ring_la.ContextParallel(scan="ring", transport=name) for name in args.transports}
    others = Peers(rank, P) if args.peers_on != ["none"] else None
    made = compiled_ahead(args)
    if rank == 0:
        print(
            f"{made} passes of Triton's kernels compiled, {time.monotonic() - began:.0f} s after the start", flush=True
        )
    for case, T in itertools.product(args.cases, args.lengths):
        for row in bench(Case.of(case, T, P, args), args, contexts, others, end):
            rows.append(row)
            if rank == 0:
                print(described(row), flush=True)
                save(args.out, machine() | dict(rows=rows))
    dist.destroy_process_group()


def compiled_ahead(args: argparse.Namespace) -> int:
    """How many passes of kernels were compiled before the first row."""
    kernels, made = [BACKENDS[name] for name in args.backends], 0
    by_groups: dict[int, set[Scores]] = {}
    for name in args.cases:
        how = CASES[name]
        left, right = how.get("window", (-1, -1))
        right = 0 if how.get("causal", True) else right
        reach = (None if side < 0 else side for side in (left, right))
        scores = Scores(args.width**-0.5, how.get("softcap", 0.0), *reach)
        by_groups.setdefault(how.get("groups", args.heads), set()).add(scores)
    for groups, scores in by_groups.items():
        made += compile_ahead(kernels, scores, (args.heads, groups), args.width)
    return made


def over(end: float) -> bool:
    """Whether any rank's clock is past `end`. Collective."""
    return bool(largest([time.monotonic() > end])[0])


class Way(NamedTuple):
    """One way to do a case: `tokens` are the places in the sequence that this rank's tensors hold."""

    name: str
    backend: str
    call: Call
    tokens: Tensor
    copied: bool = False


def ours(
    args: argparse.Namespace,
    contexts: dict[str, ring_la.ContextParallel],
    length: int,
    cu: list[int] | None,
    how: dict,
) -> list[Way]:
    """Every strategy × backend × transport, and layout where documents are packed or queries see a window."""
    out, window = [], how.get("window", (-1, -1))[0]
    for kind in args.kinds[: None if cu or window >= 0 else 1]:
        layouts = {name: layout_of(cp, length, kind, cu, how) for name, cp in contexts.items()}
        for backend, strategy in itertools.product(args.backends, args.strategies):
            for transport in contexts if strategy == "ring" else [*contexts][-1:]:
                layout, copies = layouts[transport], contexts[transport].comm.copies and strategy != "all_gather"
                more = dict(layout=layout, backend=backend, strategy=strategy, **how)
                for streams in args.streams if copies and strategy in ("ring", "auto") else ["auto"]:
                    said, two_streams = STREAMS[streams]
                    way = strategy + (", copied" if copies else ", sent") + said
                    name = f"ring_la {way} {backend}" + (f" {kind}" if cu or window >= 0 else "")
                    out.append(Way(name, backend, our_call(more, two_streams), tokens_of(layout), copies))
    return out


def layout_of(
    cp: ring_la.ContextParallel, length: int, kind: str, cu: list[int] | None, how: dict
) -> ring_la.ShardedLayout:
    """Who owns which tokens in a row of this kind; a balanced layout knows the window."""
    window = how.get("window", (-1, -1))[0]
    near = window if kind == "balanced" and window >= 0 else None
    return cp.layout(length, kind, cu_seqlens=cu, window=near)


def our_call(how: dict, two_streams: bool | None) -> Call:
    """A call with this choice of a copied ring's streams, the backward pass too if no other call is between."""
    ring = WAYS["copied"]
    assert isinstance(ring, Copied)

    def run(*tensors: Tensor) -> Tensor:
        ring.two_streams = two_streams
        return attention(*tensors, **how).o

    return run


def tokens_of(layout: ring_la.ShardedLayout) -> Tensor:
    """The places in the sequence of this rank's tokens."""
    return layout.shard(torch.arange(layout.seq_len), dim=0)


def relocated(x: Tensor, layout: ring_la.ShardedLayout, tokens: Tensor) -> Tensor:
    """Rows `tokens` of the sequence whose split `x` is under `layout`. Collective."""
    same = torch.tensor(int(torch.equal(tokens, tokens_of(layout))), device=x.device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if same:
        return x
    return layout.gather(x.detach()).index_select(1, tokens.to(x.device))


def distance(call: Call, tensors: list[Tensor], layout: ring_la.ShardedLayout, tokens: Tensor, truth: dict) -> float:
    """How far output and gradient of q are from those of the first way, relative; the larger."""
    q, k, v, do = tensors
    for _ in range(SETTLE):  # peers' scripted functions compile in their first calls
        leaf = q.detach().requires_grad_()
        o = call(leaf, k, v)
        (dq,) = torch.autograd.grad(o, leaf, do)
    apart = 0.0
    for name, x in (("o", o.detach()), ("dq", dq)):
        want = relocated(truth.setdefault(name, x), layout, tokens)
        apart = max(apart, relative_error(x, want))
    return apart


def described(row: dict) -> str:
    """A row of the table as lines of text."""
    out = f"{row['case']:12} {row['T']:6} {row['name']:44}"
    for n, title in (("", ""), ("row_", "in a row"), ("graph_", "in a CUDA graph")):
        if n + "total" in row:
            out += f"\n{title:64}" if n else ""
            out += f" fwd {row[n + 'forward']:8.2f} ms {row['share_' + n + 'forward']:4.0%}"
            out += f"   fwd+bwd {row[n + 'total']:8.2f} ms {row['share_' + n + 'total']:4.0%}"
        if not n:
            out += f"   peak {row['peak']:5.2f} GiB   apart {row['apart']:.1e}"
    return out


class Case(NamedTuple):
    """What is asked in a row: `how` are keywords of `attention`, `share` the visible pairs of all."""

    name: str
    T: int
    P: int
    heads: tuple[int, int]
    width: int
    cu: list[int]
    how: dict
    share: float

    @classmethod
    def of(cls, name: str, T: int, P: int, args: argparse.Namespace) -> Case:
        how = dict(CASES[name])
        groups, packed, window = how.pop("groups", args.heads), how.pop("packed", ""), how.get("window", (-1,))[0]
        cu = document_offsets(T * P, 2 * P, tail=packed == "tail") if packed else [0, T * P]
        share = share_of_scores(cu, window) if how.get("causal", True) else 1.0
        return cls(name, T, P, (args.heads, groups), args.width, cu, how, share)

    def peers(self, kernel: str) -> Wanted:
        """What peers are asked for."""
        window, softcap = self.how.get("window", (-1,))[0], self.how.get("softcap", 0.0)
        return Wanted(self.cu, self.how.get("causal", True), window, softcap, self.heads, kernel)

    def bound(self, kernel: str) -> Timed:
        """One call on one GPU with the FLOPs that a rank owes."""
        sizes = (self.T, self.P, *self.heads, self.width)
        return bound_of(*sizes, kernel, self.share, self.how.get("softcap", 0.0))

    def tensors(self, rank: int) -> list[Tensor]:
        """q, k, v and the gradient of o."""
        torch.manual_seed(rank)
        heads = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        shapes = [(1, self.T, h, self.width) for h in heads]
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def bench(
    case: Case,
    args: argparse.Namespace,
    contexts: dict[str, ring_la.ContextParallel],
    others: Peers | None,
    end: float,
) -> Iterator[dict]:
    """The rows of one case, as they come."""
    rank, length, packed = dist.get_rank(), case.T * case.P, case.cu if len(case.cu) > 2 else None
    ways = ours(args, contexts, length, packed, case.how)
    for kernel in args.peers_on if others else ():
        ways += [Way(f"{p.name} {kernel}", kernel, p.call, p.tokens) for p in others.of(case.peers(kernel))]
    first = layout_of(next(iter(contexts.values())), length, args.kinds[0], packed, case.how)
    drawn, bounds, truth = case.tensors(rank), {}, {}
    for name, backend, call, tokens, copied in ways:
        if over(end):
            return
        try:
            for cp in contexts.values():
                cp.comm.memory.release()
            tensors = [relocated(x, first, tokens) for x in drawn]
            apart = distance(call, tensors, first, tokens, truth)
            bounds[backend] = bounds.get(backend) or case.bound(backend)
            timed = Timed(call, tensors[:3], tensors[3])
            row = dict(case=case.name, T=case.T, P=case.P, name=name, backend=backend, apart=apart)
            row |= measure(timed, bounds[backend], args.graphs and copied) | dict(peak=largest([peak(timed.total)])[0])
            if copied:
                row["peak"] += max(cp.comm.memory.held for cp in contexts.values()) / 2**30
        except Exception as e:  # what cannot run is a line of the table; it fails on all ranks alike
            if rank == 0:
                print(f"{case.name:12} {case.T:6} {name:44} {reason(e)}", flush=True)
            continue
        yield row
