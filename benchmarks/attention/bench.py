"""Softmax attention on a split sequence beside its peers, in one run, as shares of the single-GPU bound.

    torchrun --nproc_per_node 8 -m ring_la bench attention [--lengths 16384,4096] [--out FILE.json]

The bound is one non-causal call of a kernel with the FLOPs that a rank owes: causal attention of T·P tokens is half
of T × T·P per rank. Ours runs on cuDNN, on PyTorch's FlashAttention-2 and on the Triton kernel. Where ring-flash-attn
and yunchang are installed they run in the cases they can do, on PyTorch's FlashAttention-2 where flash-attn is
absent. Times are medians of CUDA events, of the slowest rank: of one call, of one in a row of 10 calls (where
the host runs ahead, as in a model), and of replays of a CUDA graph. The bound is timed in each of these ways too,
taking turns with the call that is compared with it. All devices start together, behind a sum over the ranks: when
their hosts come out of a barrier is no part of what is measured, nor of the bound. Every variant's output and gradient
of q are first compared, token by token, with those of the first one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import random
import sys
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

from ..options import counts, names
from ..peers.attention import Call, Peers
from .measure import Timed, bound_of, measure, peak
from .table import table

SETTLE = 6
"""Calls of a way before it is compared."""
STRATEGIES = ("ring", "all_gather", "ulysses")
CASES: dict[str, dict] = {
    "causal": dict(),
    "gqa 32:8": dict(groups=8),
    "packed": dict(packed=True),
    "window 4096": dict(window=(4096, -1)),
    "softcap 30": dict(softcap=30.0),
}


def document_offsets(total: int, unit: int, count: int = 30) -> list[int]:
    """Lengths drawn log-uniformly, filling the sequence, in multiples of `unit` (some peers take no others)."""
    draw = random.Random(0)
    lengths = [math.exp(draw.uniform(math.log(64), math.log(total))) for _ in range(count)]
    cuts, acc = [0], 0.0
    for n in lengths:
        acc += n
        cuts.append(round(acc / sum(lengths) * total / unit) * unit)
    return cuts


def share_of_scores(cu: list[int], window: int) -> float:
    """Visible pairs over all pairs."""
    seen = 0.0
    for a, b in zip(cu, cu[1:]):
        n = b - a
        w = n if window < 0 else min(n, window + 1)
        seen += w * (w + 1) / 2 + (n - w) * w
    return seen / cu[-1] ** 2


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
    rank, P, rows = dist.get_rank(), dist.get_world_size(), []
    contexts = {name: ring_la.ContextParallel(scan="ring", transport=name) for name in args.transports}
    others = Peers(rank, P)
    facts = dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
    if rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    for case in args.cases:
        for T in args.lengths:
            rows += bench(case, T, P, args, contexts, others, rank)
            if rank == 0:
                args.out.write_text(json.dumps(facts | dict(rows=rows), indent=1))
    dist.destroy_process_group()


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
    """Every strategy × backend × transport, and layout where documents are packed."""
    out = []
    for kind in args.kinds[: None if cu else 1]:
        layouts = {name: cp.layout(length, kind, cu_seqlens=cu) for name, cp in contexts.items()}
        for backend, strategy in itertools.product(args.backends, args.strategies):
            for transport in contexts if strategy == "ring" else [*contexts][-1:]:
                layout, copied = layouts[transport], strategy == "ring" and contexts[transport].comm.copies
                more = dict(layout=layout, backend=backend, strategy=strategy, **how)
                way = {"ring": "ring, copied" if copied else "ring, sent"}.get(strategy, strategy)
                name = f"ring_la {way} {backend}" + (f" {kind}" if cu else "")
                out.append(Way(name, backend, lambda *x, more=more: attention(*x, **more).o, tokens_of(layout), copied))
    return out


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
        want = relocated(truth.setdefault(name, x), layout, tokens).float()
        apart = max(apart, ((x.float() - want).norm() / want.norm()).item())
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


def bench(
    case: str,
    T: int,
    P: int,
    args: argparse.Namespace,
    contexts: dict[str, ring_la.ContextParallel],
    others: Peers,
    rank: int,
) -> list[dict]:
    how = dict(CASES[case])
    groups, packed, window = how.pop("groups", args.heads), how.pop("packed", False), how.get("window", (-1,))[0]
    cu = document_offsets(T * P, 2 * P) if packed else [0, T * P]
    share = share_of_scores(cu, window)
    torch.manual_seed(rank)
    q, do = (torch.randn(1, T, args.heads, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, T, groups, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ways = ours(args, contexts, T * P, cu if packed else None, how)
    ways += [Way(peer.name, "flash", peer.call, peer.tokens) for peer in others.of(cu, window, how.get("softcap", 0.0))]
    first = next(iter(contexts.values())).layout(T * P, args.kinds[0], cu_seqlens=cu if packed else None)
    rows, bounds, truth = [], {}, {}
    for name, backend, call, tokens, copied in ways:
        try:
            for cp in contexts.values():
                cp.comm.memory.release()
            tensors = [relocated(x, first, tokens) for x in (q, k, v, do)]
            apart = distance(call, tensors, first, tokens, truth)
            if backend not in bounds:
                softcap = how.get("softcap", 0.0)
                bounds[backend] = bound_of(T, P, args.heads, groups, args.width, backend, share, softcap)
            timed = Timed(call, tensors[:3], tensors[3])
            row = dict(case=case, T=T, P=P, name=name, backend=backend, apart=apart)
            row |= measure(timed, bounds[backend], args.graphs and copied) | dict(peak=peak(timed))
            if copied:
                row["peak"] += max(cp.comm.memory.held for cp in contexts.values()) / 2**30
        except Exception as e:  # what cannot run is a line of the table; it fails on all ranks alike
            if rank == 0:
                print(f"{case:12} {T:6} {name:44} {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
            continue
        rows.append(row)
        if rank == 0:
            print(described(row), flush=True)
    return rows
