"""Softmax attention on a split sequence beside its peers, in one run, as shares of the single-GPU bound.

    torchrun --nproc_per_node 8 -m ring_la bench attention [--lengths 16384,4096] [--out FILE.json]

The bound is one non-causal call of a kernel with the FLOPs that a rank owes: causal attention of T·P tokens is half of
T × T·P per rank. Ours runs on cuDNN, on PyTorch's FlashAttention-2 and on the Triton kernel; ring-flash-attn and
yunchang run where they are installed, on PyTorch's FlashAttention-2 where flash-attn is absent.
Times are medians of CUDA events, of the slowest rank. Every variant is first compared with the first one.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import math
import os
import pathlib
import random
import statistics
import sys
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la.comm.memory import Memory
from ring_la.softmax import attention

ROUNDS, WARM, SETTLE = 7, 3, 6
CASES: dict[str, dict] = {
    "causal": dict(),
    "gqa 32:8": dict(groups=8),
    "packed": dict(packed=True),
    "window 4096": dict(window=(4096, -1)),
    "softcap 30": dict(softcap=30.0),
}
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of the slowest rank."""
    for _ in range(WARM):
        function()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(call: Call, tensors: list[Tensor], do: Tensor) -> dict[str, float]:
    """Forward, forward + backward (ms), and peak memory of the latter above what is held (GiB), of the worst rank."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def both() -> None:
        torch.autograd.grad(call(*leaves), leaves, do)

    with torch.no_grad():
        forward = milliseconds(lambda: call(*leaves))
    total = milliseconds(both)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    both()
    peak = torch.tensor((torch.cuda.max_memory_allocated() - held) / 2**30, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return dict(forward=forward, total=total, peak=peak.item())


def replayed(call: Call, tensors: list[Tensor], do: Tensor) -> dict[str, float]:
    """Forward and forward + backward (ms) as replays of CUDA graphs."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def both() -> None:
        torch.autograd.grad(call(*leaves), leaves, do)

    out = {}
    for name, function in (("forward", torch.no_grad()(lambda: call(*leaves))), ("total", both)):
        function()  # memory and kernels that a graph may not make
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        out[f"graph_{name}"] = milliseconds(graph.replay)
    return out


def bound(T: int, P: int, H: int, groups: int, D: int, backend: str, share: float, softcap: float) -> dict[str, float]:
    """One non-causal call with ``share`` of the FLOPs of T × T·P scores."""
    keys = max(128, int(T * P * share) // 128 * 128)
    q, do = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, keys, groups, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return measure(lambda *x: attention(*x, causal=False, softcap=softcap, backend=backend).o, [q, k, v], do)


def document_offsets(total: int, count: int = 30) -> list[int]:
    """Lengths drawn log-uniformly, filling the sequence."""
    draw = random.Random(0)
    lengths = [math.exp(draw.uniform(math.log(64), math.log(total))) for _ in range(count)]
    cuts, acc = [0], 0.0
    for n in lengths:
        acc += n
        cuts.append(round(acc / sum(lengths) * total))
    return cuts


def share_of_scores(cu: list[int], window: int) -> float:
    """Visible pairs over all pairs."""
    seen = 0.0
    for a, b in zip(cu, cu[1:]):
        n = b - a
        w = n if window < 0 else min(n, window + 1)
        seen += w * (w + 1) / 2 + (n - w) * w
    return seen / cu[-1] ** 2


def use_pytorch_kernels_as_flash_attn() -> None:
    """flash_attn's private entry points over PyTorch's FlashAttention-2, for peers without flash-attn."""
    aten, kept = torch.ops.aten, {}

    def bounds(left: int, right: int) -> dict:
        return dict(window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right)

    def forward(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        o, lse, rng, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale,
            **bounds(window_size_left, window_size_right),
        )  # fmt: skip
        return o, lse, None, rng

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
    ):  # fmt: skip
        rng = kept.setdefault("rng", torch.zeros(2, dtype=torch.uint64, device=q.device))
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], dropout_p, causal, rng,
            torch.empty(0, device=q.device), scale=softmax_scale, **bounds(window_size_left, window_size_right),
        )  # fmt: skip
        for into, grad in zip((dq, dk, dv), grads):
            into.copy_(grad)

    def absent(*_, **__):
        raise NotImplementedError("not part of this benchmark")

    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.__path__ = "2.8.3", []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(package, name, absent)
        setattr(interface, name, absent)
    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = absent
    package.flash_attn_interface = interface
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = absent
    for module in (package, interface, adapters):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def peers(P: int) -> dict[str, Call]:
    """ring-flash-attn and yunchang where they are installed."""
    if importlib.util.find_spec("flash_attn") is None:
        use_pytorch_kernels_as_flash_attn()
    out: dict[str, Call] = {}
    try:
        from ring_flash_attn import zigzag_ring_flash_attn_func as theirs

        out["ring-flash-attn zigzag"] = lambda q, k, v: theirs(q, k, v, causal=True)
    except ImportError as e:
        print(f"without ring-flash-attn: {e}", flush=True)
    try:
        from yunchang import LongContextAttention, set_seq_parallel_pg

        rank = dist.get_rank()
        for ulysses, ring in ((1, P), (max(1, P // 2), min(2, P))):
            set_seq_parallel_pg(ulysses, ring, rank, P)
            layer = LongContextAttention(ring_impl_type="zigzag")
            out[f"yunchang ulysses {ulysses} × ring {ring}"] = lambda q, k, v, layer=layer: layer(q, k, v, causal=True)
    except ImportError as e:
        print(f"without yunchang: {e}", flush=True)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", default="4096,16384", help="tokens a rank, the shortest first (memory is kept)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--strategies", default="ring,all_gather,ulysses")
    parser.add_argument("--backends", default="cudnn,flash,triton")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_attention.json"))
    parser.add_argument("--transports", default="torch,auto", help="of the ring; the others go by the last one")


def run(args: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, P, rows = dist.get_rank(), dist.get_world_size(), []
    contexts = {name: ring_la.ContextParallel(scan="ring", transport=name) for name in args.transports.split(",")}
    others = peers(P)
    facts = dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
    if rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    for case in args.cases.split(","):
        for T in map(int, args.lengths.split(",")):
            rows += bench(case, T, P, args, contexts, others, rank)
            if rank == 0:
                args.out.write_text(json.dumps(facts | dict(rows=rows), indent=1))
    dist.destroy_process_group()


def bench(
    case: str,
    T: int,
    P: int,
    args: argparse.Namespace,
    contexts: dict[str, ring_la.ContextParallel],
    others: dict[str, Call],
    rank: int,
) -> list[dict]:
    how = dict(CASES[case])
    groups, packed = how.pop("groups", args.heads), how.pop("packed", False)
    cu = document_offsets(T * P) if packed else None
    share = share_of_scores(cu or [0, T * P], how.get("window", (-1,))[0])
    layouts = {name: cp.layout(T * P, "zigzag", cu_seqlens=cu) for name, cp in contexts.items()}
    torch.manual_seed(rank)
    q, do = (torch.randn(1, T, args.heads, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, T, groups, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, tuple[str | None, Call]] = {}
    for backend in args.backends.split(","):
        for strategy in args.strategies.split(","):
            for transport in contexts if strategy == "ring" else [*contexts][-1:]:
                more = dict(layout=layouts[transport], backend=backend, strategy=strategy, **how)
                way = strategy
                if strategy == "ring":
                    way += ", copied" if contexts[transport].comm.copies else ", sent"
                calls[f"ring_la {way} {backend}"] = backend, lambda *x, more=more: attention(*x, **more).o
    if case in ("causal", "gqa 32:8"):
        calls |= {name: ("flash", call) for name, call in others.items()}
    rows, bounds, first = [], {}, None
    for name, (backend, call) in calls.items():
        try:
            for cp in contexts.values():
                Memory.release(cp.comm)
            for _ in range(SETTLE):  # peers' scripted functions compile in their first calls
                out = call(q, k, v)
            first = out.detach() if first is None else first
            apart = ((out - first).float().norm() / first.float().norm()).item()
            if name.startswith("yunchang") and "ulysses 1 " not in name:
                apart = math.nan  # it holds other tokens of the sequence
            if backend not in bounds:
                bounds[backend] = bound(T, P, args.heads, groups, args.width, backend, share, how.get("softcap", 0.0))
            row = dict(case=case, T=T, P=P, name=name, backend=backend, apart=apart, **measure(call, [q, k, v], do))
            if ", copied" in name:
                row |= replayed(call, [q, k, v], do)
                row["peak"] += max(Memory.held(cp.comm) for cp in contexts.values()) / 2**30
        except Exception as e:  # what cannot run is a line of the table; it fails on all ranks alike
            if rank == 0:
                print(f"{case:12} {T:6} {name:36} {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
            continue
        limit = bounds[backend]
        row |= {f"share_{n}": limit[n] / row[n] for n in ("forward", "total")}
        row |= {f"share_graph_{n}": limit[n] / row[f"graph_{n}"] for n in ("forward", "total") if f"graph_{n}" in row}
        rows.append(row)
        if rank == 0:
            print(
                f"{case:12} {T:6} {name:36} fwd {row['forward']:8.2f} ms {row['share_forward']:4.0%}   fwd+bwd "
                f"{row['total']:8.2f} ms {row['share_total']:4.0%}   peak {row['peak']:5.2f} GiB   apart {apart:.1e}",
                flush=True,
            )
            if "graph_total" in row:
                print(
                    f"{'in a CUDA graph':56} fwd {row['graph_forward']:8.2f} ms {row['share_graph_forward']:4.0%}   "
                    f"fwd+bwd {row['graph_total']:8.2f} ms {row['share_graph_total']:4.0%}",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    from .main import main

    sys.exit(main(["bench", "attention", *sys.argv[1:]]))
