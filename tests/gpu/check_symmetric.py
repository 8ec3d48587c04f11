"""Symmetric memory as a transport: `torchrun --nproc_per_node N -m tests.gpu.check_symmetric --out folder`.

Parts, each with its own limit, each written to folder/symmetric.json when it is done:

    messages    every pattern of `Group`, equal to NCCL's to the bit, under delays that make ranks drift apart
    strategies  every recurrence of a few × scan × layout, fp64, against the token loop (1e-9), and bytes as NCCL's
    links       the ring by one kernel a link, every kind of map and chain, against the serial recursion in fp64; and
                microseconds of each strategy's exchange alone by either transport
    latency     microseconds of each pattern by size, eager and in a CUDA graph, beside NCCL
    graph       forward and backward of a sharded call captured and replayed on new inputs, equal to the eager call
    exposed     one call's time beside the local work alone, and by the profiler the time in which only messages run
    borders     recurrences whose kernels exchange states among their own launches, bf16 and fp32, against one device
                in fp64: zigzag, packed, several rows, with states; replayed, and captured
    halos       a split convolution under transport="auto", whose halo goes by mailboxes, beside the whole one
    canonical   deterministic=True under transport="auto": the same bits on 1 GPU and on all
    late        a peer that does not send: NaN within the timeout, then a PeerError that names it
    late_link   the same of a ring by mailboxes under transport="auto"
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from ring_la.algebra import Affine, transpose
from ring_la.cli.scan_cases import exchanges
from ring_la.comm import Group
from ring_la.layout import Layout
from ring_la.scan import STRATEGIES, Chain, Link, MailboxBorder
from tests.conformance import test_sharded as sharded
from tests.conformance.cases import DOCUMENTS, make_inputs
from tests.distributed import pool
from tests.scan import test_border as border
from tests.scan import test_mailbox_ring as mailbox

TRANSPORTS = ("torch", "symmetric")
CASES = (("simple_gla", 16384), ("gated_delta_rule", 16384), ("simple_gla", 4096), ("gated_delta_rule", 4096))
BORDERS = (
    ("linear_attention", "contiguous", torch.bfloat16),
    ("simple_gla", "documents", torch.bfloat16),
    ("retention", "zigzag", torch.bfloat16),
    ("gla", "rows", torch.float32),
    ("gated_delta_rule", "documents", torch.bfloat16),
    ("kda", "zigzag", torch.bfloat16),
    ("delta_rule", "rows", torch.float32),
)
GRAPHS = len(BORDERS)
CHOSEN: list[int] = []
FOLDER: list[Path] = []
LIMIT = {
    "links": 60, "messages": 30, "strategies": 45, "latency": 40, "graph": 60, "exposed": 75, "late": 30,
    "late_link": 30, "borders": 90, "canonical": 40, "halos": 40,
}  # fmt: skip


def note(line: str) -> None:
    """A verdict of this rank, at once: a whole line on the screen, and in folder/rank<n>.txt."""
    line = f"rank {dist.get_rank()}: {line}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    with (FOLDER[0] / f"rank{dist.get_rank()}.txt").open("a") as file:
        file.write(line)


def groups() -> dict[str, Group]:
    return {t: Group(None, timedelta(seconds=60), t) for t in TRANSPORTS}


def messages() -> dict:
    """Every pattern by both transports, equal; ranks are delayed at random, so that some run ahead."""
    by = groups()
    rank, P, device = by["torch"].rank, by["torch"].size, by["torch"].device
    random = torch.Generator().manual_seed(rank)
    checked = 0
    for n in (20, 1024, 100_000, 524_288, 3_000_000, 12_000_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            for repeat in range(2):
                torch.cuda._sleep(int(torch.randint(1, 400_000, (), generator=random)))
                x = torch.randint(-999, 999, (n,), generator=random).to(device, dtype)
                rows = x[: n // P * P].view(P, -1)
                right, left = (rank + 1) % P, (rank - 1) % P
                got: dict[str, list[torch.Tensor]] = {t: [] for t in TRANSPORTS}
                for t, g in by.items():
                    came = {left: torch.empty_like(x)}
                    pending = [g.all_gather(x), g.all_to_all(rows), g.exchange({right: x}, came)]
                    if dtype == torch.float32 and n <= 1_000_000:
                        pending.append(g.all_reduce(x))
                    if rank % 2:
                        torch.cuda._sleep(200_000)
                    got[t] = [p.wait() for p in pending]
                    got[t][2] = came[left]
                    sends = {r: x[: 4 * (1 + (rank + 2 * r) % 3)] for r in range(P) if r != rank}
                    came = {r: x.new_empty(4 * (1 + (r + 2 * rank) % 3)) for r in range(P) if r != rank}
                    g.exchange(sends, came).wait()
                    got[t] += [came[r] for r in sorted(came)]
                    passed = g.recv(x.shape, dtype, device, rank - 1).wait() if rank else x
                    if rank < P - 1:
                        g.send(passed, rank + 1).wait()
                    got[t].append(passed)
                assert all(torch.equal(a, b) for a, b in zip(*got.values())), (n, dtype, repeat)
                checked += len(got["torch"])
    assert by["symmetric"].transport.late() == []
    return {"messages compared": checked}


@functools.lru_cache
def context(P: int, scan: str, transport: str) -> ring_la.ContextParallel:
    return ring_la.ContextParallel(pool.group(P), scan=scan, transport=transport)


def strategies() -> dict:
    """Worst error by recurrence and transport; the bytes of both transports are the same."""
    rank, out = dist.get_rank(), {}
    for P in sorted({2, dist.get_world_size()}):
        if rank >= P:
            continue
        for name in ("simple_gla", "gla", "gated_delta_rule", "retention"):
            for documents, kind in (("packed", "zigzag"), ("uneven", "contiguous")):
                sent = {}
                for transport in TRANSPORTS:
                    sharded.context = functools.partial(context, transport=transport)
                    comms = [context(P, scan, transport).comm for scan in STRATEGIES]
                    before = sum(c.bytes_sent for c in comms)
                    errors = sharded.check_sharded(rank, P, name, documents, kind, tuple(STRATEGIES))
                    sent[transport] = sum(c.bytes_sent for c in comms) - before
                    worst = max(e for by in errors.values() for e in by.values())
                    out[f"P={P} {name} {documents} {kind} {transport}"] = worst
                    assert worst < 1e-9, (P, name, documents, kind, transport, errors)
                assert len(set(sent.values())) == 1, sent
    return {"checks": len(out), "worst": max(out.values(), default=0.0), "documents": list(DOCUMENTS)}


def links() -> dict:
    """By kind of map: the worst error of the ring's links, and µs, eager and in a graph, of each exchange alone."""
    by, out = groups(), {}
    g, shape = by["symmetric"], (1, 32, 128, 128)
    random = torch.Generator().manual_seed(g.rank)
    for kind in ("identity", "scalar", "diagonal", "dense"):
        worst = 0.0
        for layout, documents in (("contiguous", None), ("zigzag", None), ("zigzag", [0, 5, 16, 40, 48])):
            whole = Chain.of(Layout(48, layout, g.size, g.rank, documents))
            forward = mailbox.maps(whole, kind, shape, "cuda")
            back = [Affine(kind, transpose(kind, m.A), m.b) for m in forward[::-1]]
            for chain, maps in ((whole, forward), (whole.reversed, back)) * 2:
                torch.cuda._sleep(int(torch.randint(1, 400_000, (), generator=random)))
                mine = [Link(maps[i]) for i in chain.local(g.rank)]
                got = STRATEGIES["ring"].start(chain, mine, Affine(kind, None, maps[0].b), g).wait()
                wide = [Affine(kind, None if m.A is None else m.A.double(), m.b.double()) for m in maps]
                want = mailbox.serial(chain, wide)
                for i, state in zip(chain.local(g.rank), got):
                    assert (state is None) == (want[i] is None), (kind, i)
                    if state is not None:
                        worst = max(worst, ((state - want[i]).norm() / want[i].norm()).item())
        assert worst < 1e-6, (kind, worst)
        row: dict = {"worst": worst}
        for transport, group in by.items():
            runs = exchanges(group, Affine(kind, None, torch.empty(shape, device="meta")))
            row[transport] = {name: (microseconds(run), microseconds(captured(run))) for name, run in runs.items()}
        out[kind] = row
        if g.rank == 0:
            print(kind, row, flush=True)
    assert g.transport.late() == []
    return out


def borders() -> dict[str, object]:
    """The worst error by case, and of replayed graphs beside eager calls on other inputs."""
    out, begun, begin, began = {}, [], MailboxBorder.begin, time.monotonic()
    MailboxBorder.begin = lambda self, size, reverse: (begun.append(size), begin(self, size, reverse))[1]
    cp = context(dist.get_world_size(), "ring", "auto")
    try:
        chosen = CHOSEN or range(GRAPHS + 1)
        for n in [n for n in chosen if n != GRAPHS]:
            (name, kind, dtype), met = BORDERS[n], len(begun)
            shape = dict(Hk=2, H=4, K=64, V=128) if kind == "zigzag" else dict(Hk=4, H=4, K=128, V=128)
            first(functools.partial(compiled, name, dtype, **shape))
            found = border.errors(cp, name, kind, 9, dtype, **shape)
            key, limit = f"{name} {kind} {dtype}", 2e-2 if dtype == torch.bfloat16 else 1e-4
            out[key] = max(found.values())
            worst = max(found, key=found.__getitem__)
            note(f"{key}: worst {worst} {found[worst]:.1e}, limit {limit:.0e}, {time.monotonic() - began:.1f} s")
            assert out[key] < limit, (key, found)
            assert len(begun) - met == 10 * (cp.size > 1), (key, "not by mailboxes")
        for name in ("simple_gla", "gated_delta_rule") if GRAPHS in chosen else ():
            x, do = inputs(name, 4096, 32, 0), torch.randn(1, 4096, 32, 128, device="cuda").bfloat16()
            first(functools.partial(both_ways, name, x, do, None))
            out[f"graph {name}"] = replayed(name, cp)
            note(f"graph {name}: {out[f'graph {name}']}, {time.monotonic() - began:.1f} s")
            assert out[f"graph {name}"]["error"] < 1e-2, (name, out)
    finally:
        MailboxBorder.begin = begin
    return out


def first(run) -> None:
    """Run on one rank, which compiles, before the others find what it left."""
    if dist.get_rank() == 0:
        run()
    dist.barrier()


def compiled(name: str, dtype: torch.dtype, **shape: int) -> None:
    """The kernels of a split call on one device: packed documents with states, and without."""
    x = {n: t.detach().to("cuda") for n, t in make_inputs(name, B=1, T=600, **shape, dtype=torch.float32).items()}
    x = {n: t.to(dtype if n in ("q", "k", "v") else torch.float32) for n, t in x.items()}
    cu, S = (
        torch.tensor([0, 300, 600], device="cuda"),
        torch.zeros(2, shape["H"], shape["K"], shape["V"], device="cuda"),
    )
    border.ended(name, x, S, torch.ones_like(x["v"]), S, cu_seqlens=cu)
    border.ended(name, x, None, torch.ones_like(x["v"]), None, cu_seqlens=cu)


def halos() -> dict:
    """A split convolution under transport="auto" beside the whole one, eager and as a graph on other inputs."""
    cp, D, T, out = context(dist.get_world_size(), "ring", "auto"), 1024, 512, {}
    draw = torch.Generator("cuda").manual_seed(0)
    for kind in ("contiguous", "zigzag"):
        layout = cp.layout(T * cp.size, kind)
        inputs = [torch.randn(2, 1, T * cp.size, D, generator=draw, device="cuda") for _ in range(2)]
        w = torch.randn(D, 4, generator=draw, device="cuda", requires_grad=True)
        x, do = (layout.shard(t[0]) for t in inputs)
        x.requires_grad_()

        def split(x=x, do=do, w=w, layout=layout) -> list[torch.Tensor]:
            o = ring_la.short_conv(x, w, None, "silu", layout=layout).o
            return [o, *torch.autograd.grad(o, (x,), do)]

        kept: list[torch.Tensor] = []
        replay = captured(lambda split=split, kept=kept: kept.__setitem__(slice(None), split()))
        for n in range(2):
            whole, dwhole = (t[n].clone() for t in inputs)
            with torch.no_grad():
                x.copy_(layout.shard(whole)), do.copy_(layout.shard(dwhole))
            replay()
            whole.requires_grad_()
            o = ring_la.short_conv(whole, w, None, "silu").o
            want = [layout.shard(t) for t in (o, *torch.autograd.grad(o, (whole,), dwhole))]
            for got in (kept, split()):
                worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want))
                out[f"{kind} {n}"] = max(worst, out.get(f"{kind} {n}", 0.0))
        assert all(e < 1e-6 for e in out.values()), out
        note(f"halos {kind}: {out}")
    assert cp.comm.mailboxes.late() == []
    return out


def canonical() -> dict:
    """Outputs whose bits do not depend on the number of GPUs."""
    P, T = dist.get_world_size(), 1024
    alone = [dist.new_group([rank]) for rank in range(P)][dist.get_rank()]
    make = functools.partial(ring_la.ContextParallel, deterministic=True, transport="auto", validate="never")
    split, one = make(pool.group(P)), make(alone)
    for name in ("simple_gla", "gated_delta_rule"):
        rng = torch.Generator("cuda").manual_seed(0)
        x = {n: t.detach() for n, t in inputs(name, T, 4, 0).items()}
        for t in x.values():
            t.copy_(-torch.rand(t.shape, generator=rng, device="cuda") if t.dim() == 3 else
                    torch.randn(t.shape, generator=rng, device="cuda") / 12)  # fmt: skip
        if "beta" in x:
            x["beta"].neg_()
        op, layout = getattr(ring_la, name), split.layout(T, "contiguous")
        whole = op(**x, layout=one.layout(T, "contiguous"), output_final_state=True)
        mine = op(**{n: layout.shard(t) for n, t in x.items()}, layout=layout, output_final_state=True)
        assert torch.equal(layout.shard(whole.o), mine.o), name
        assert torch.equal(whole.final_state, mine.final_state), name
    return {"tokens": T}


def microseconds(run, repeats: int = 20) -> float:
    """Median over calls of the slowest rank."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in zip(events, events[1:])], device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return round(times.median().item() * 1e3, 1)


def captured(run, warm: int = 3):
    """`run` as a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def latency() -> list[dict]:
    by, out = groups(), []
    for size in (64, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20):
        for transport in TRANSPORTS[::-1]:
            row = {"KiB": size / 1024, "transport": transport} | patterns(by[transport], size)
            out.append(row)
            if dist.get_rank() == 0:
                print(row, flush=True)
    return out


def patterns(g: Group, size: int) -> dict[str, float]:
    """Microseconds of each pattern for messages of `size` bytes."""
    x = torch.randn(size // 4, device=g.device)
    room, rows = torch.empty_like(x), x[: x.numel() // g.size * g.size].view(g.size, -1)
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    runs = {
        "swap": lambda: g.exchange({right: x}, {left: room}).wait(),
        "all_gather": lambda: g.all_gather(x).wait(),
        "all_to_all": lambda: g.all_to_all(rows).wait(),
        "all_reduce": lambda: g.all_reduce(x).wait(),
        "chain": lambda: chain(g, x),
    }
    out = {name: microseconds(run, 15) for name, run in runs.items()}
    if size <= 8 << 20:
        out |= {f"{name} graph": microseconds(captured(runs[name]), 15) for name in ("swap", "all_gather")}
    return out


def chain(g: Group, x: torch.Tensor) -> None:
    if g.rank:
        x = g.recv(x.shape, x.dtype, x.device, g.rank - 1).wait()
    if g.rank < g.size - 1:
        g.send(x, g.rank + 1).wait()


def inputs(name: str, T: int, H: int, seed: int) -> dict[str, torch.Tensor]:
    """bf16 tokens of this rank, K = V = 128; half-lives from 16 to 65,536 tokens over the heads."""
    rng = torch.Generator("cuda").manual_seed(seed * 1000 + dist.get_rank())
    draw = lambda *s: torch.randn(*s, generator=rng, device="cuda")  # noqa: E731
    x = {n: draw(1, T, H, 128).bfloat16() for n in "qkv"}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    rate = 0.6931 / torch.logspace(4, 16, H, 2.0, device="cuda")
    if name in ("simple_gla", "gated_delta_rule"):
        x["g"] = -rate * torch.rand(1, T, H, generator=rng, device="cuda") * 2
    if name in ("gla", "kda"):
        x["g"] = -rate[:, None] * torch.rand(1, T, H, 128, generator=rng, device="cuda") * 2
    if name in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"] = torch.sigmoid(draw(1, T, H))
    return {n: t.requires_grad_() for n, t in x.items()}


def both_ways(name: str, x: dict, do: torch.Tensor, layout) -> list[torch.Tensor]:
    out = getattr(ring_la, name)(**x, layout=layout).o
    return [out, *torch.autograd.grad(out, list(x.values()), do)]


def graph() -> dict:
    """Replay on new inputs is the eager call on them."""
    out = {}
    for transport in TRANSPORTS[::-1]:
        scans = ("ring", "all_gather") if transport == "torch" else tuple(STRATEGIES)
        for name in ("simple_gla", "gated_delta_rule"):
            for scan in scans:
                out[f"{transport} {name} {scan}"] = row = replayed(
                    name, context(dist.get_world_size(), scan, transport)
                )
                if dist.get_rank() == 0:
                    print(transport, name, scan, row, flush=True)
                assert row["error"] < 1e-2, (transport, name, scan, row)
    return out


def replayed(name: str, cp: ring_la.ContextParallel, T: int = 4096, H: int = 32) -> dict[str, float]:
    began, layout = time.monotonic(), cp.layout(T * cp.size, "contiguous")
    x, new, do = inputs(name, T, H, 0), inputs(name, T, H, 1), torch.randn(1, T, H, 128, device="cuda").bfloat16()
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept[:] = both_ways(name, x, do, layout)

    replay = captured(run)
    with torch.no_grad():
        for n, t in x.items():
            t.copy_(new[n])
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    got = [t.detach().clone() for t in kept]
    want = both_ways(name, new, do, layout)
    error = max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(got, want))
    times = {"graph us": microseconds(replay, 8), "eager us": microseconds(run, 8)}
    return {"error": error} | times | {"seconds": round(time.monotonic() - began, 1)}


def exposed() -> list[dict]:
    """Exposed communication by strategy and transport, by difference and by the profiler's trace."""
    rows = []
    for name, T in (
        ("simple_gla", 16384),
        ("gated_delta_rule", 16384),
        ("simple_gla", 4096),
        ("gated_delta_rule", 4096),
    ):
        H = 32
        x, do = inputs(name, T, H, 0), torch.randn(1, T, H, 128, device="cuda").bfloat16()
        arms = {"local": None}
        for transport in TRANSPORTS:
            for scan in ("ring", "all_gather", "all_to_all"):
                cp = context(dist.get_world_size(), scan, transport)
                arms[f"{transport} {scan}"] = cp.layout(T * cp.size, "contiguous")
        runs = {arm: functools.partial(both_ways, name, x, do, layout) for arm, layout in arms.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(3):
            for arm, run in runs.items():
                best[arm] = min(best[arm], microseconds(run, 6))
        for arm, run in runs.items():
            row = {"op": name, "T": T, "arm": arm, "us": best[arm], "share": round(best["local"] / best[arm], 3)}
            row |= traced(run) if T == 16384 and arm != "local" else {}
            if arm == "local" or "all_gather" in arm:
                try:
                    row["graph us"] = microseconds(captured(run), 8)
                except Exception as error:  # a transport that cannot be captured is a line of the table
                    row["graph us"] = repr(error)[:200]
            rows.append(row)
            if dist.get_rank() == 0:
                print(row, flush=True)
    return rows


def traced(run, calls: int = 4) -> dict:
    """Microseconds a call: kernels' time on the busiest stream, on the others, and on those while it stood still."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    names: dict[str, float] = {}
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams.setdefault(e["args"]["stream"], []).append((e["ts"], e["ts"] + e["dur"]))
            names[e["name"][:48]] = names.get(e["name"][:48], 0) + e["dur"] / calls
    busiest = max(streams, key=lambda s: sum(b - a for a, b in streams[s]))
    main = union(streams[busiest])
    others = union([i for s, spans in streams.items() if s != busiest for i in spans])
    host = sum(e["dur"] for e in events if e.get("cat") == "cuda_runtime" and "Launch" in e.get("name", "")) / calls
    return {
        "main busy": round(length(main) / calls, 1),
        "others busy": round(length(others) / calls, 1),
        "exposed": round((length(union([*main, *others])) - length(main)) / calls, 1),
        "idle": round((main[-1][1] - main[0][0] - length(union([*main, *others]))) / calls, 1),
        "host launches": round(host, 1),
        "kernels": sum(len(s) for s in streams.values()) // calls,
        "top": {n: round(t, 1) for n, t in sorted(names.items(), key=lambda i: -i[1])[:12]},
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def length(spans: list[tuple[float, float]]) -> float:
    return sum(b - a for a, b in spans)


def late() -> dict:
    """The last rank does not send what the first waits for."""
    g = Group(None, timedelta(seconds=3), "symmetric")
    x = torch.ones(1024, device=g.device)
    g.all_gather(x).wait()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    out, began = {}, time.monotonic()
    if g.rank == 0:
        got = g.recv(x.shape, x.dtype, x.device, g.size - 1).wait()
        torch.cuda.synchronize()
        assert bool(got.isnan().all()), got
        out["seconds until NaN"] = round(time.monotonic() - began, 2)
        try:
            g.all_gather(x)
        except ring_la.PeerError as error:
            out["error"] = str(error)
        assert f"rank {g.size - 1}" in out["error"]
    return out


def late_link() -> dict:
    """The first rank does not send its state."""
    g = Group(None, timedelta(seconds=3), "auto")
    assert g.mailboxes is not None
    link = Link(Affine("scalar", torch.ones(1, 32, device=g.device), torch.ones(1, 32, 128, 128, device=g.device)))
    like, chain, out = Affine("scalar", None, link.map.b), Chain.line(g.size), {}
    ring = functools.partial(STRATEGIES["ring"].start, chain, [link], like, g)
    ring().wait()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.monotonic()
    if g.rank == 1:
        (entering,) = ring().wait()
        torch.cuda.synchronize()
        assert bool(entering.isnan().all())
        out["seconds until NaN"] = round(time.monotonic() - began, 2)
        try:
            ring().wait()
        except ring_la.PeerError as error:
            out["error"] = str(error)
        assert "rank 0" in out["error"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/symmetric"))
    parser.add_argument(
        "--parts", default="messages,links,borders,halos,strategies,canonical,exposed,graph,latency,late_link,late"
    )
    parser.add_argument("--borders", default="", help=f"numbers of BORDERS, {GRAPHS}: graphs; default: all")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no part is started")
    args = parser.parse_args()
    CHOSEN.extend(int(n) for n in args.borders.split(",") if n)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    rank, world, start, result = dist.get_rank(), dist.get_world_size(), time.monotonic(), {}
    for P in range(1, world + 1):
        pool._groups[P] = dist.new_group(list(range(P)))
    args.out.mkdir(parents=True, exist_ok=True)
    FOLDER.append(args.out)
    for part in args.parts.split(","):
        stop = torch.tensor([time.monotonic() - start > args.budget])
        dist.broadcast(stop, 0, group=control)
        if stop.item():
            break
        faulthandler.dump_traceback_later(LIMIT[part], exit=True)
        began, value, failed = time.monotonic(), None, ""
        try:
            value = globals()[part]()
        except Exception:
            failed = traceback.format_exc()
            print(f"rank {rank}, {part}\n{failed}", flush=True)
        everywhere: list = [None] * world
        dist.all_gather_object(everywhere, failed, group=control)
        faulthandler.cancel_dump_traceback_later()
        bad = [f"rank {r}: {f}" for r, f in enumerate(everywhere) if f]
        result[part] = {"ok": not bad, "seconds": round(time.monotonic() - began, 1), "value": value, "failures": bad}
        if rank == 0:
            about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "ranks": world}
            (args.out / "symmetric.json").write_text(json.dumps(about | result, indent=1))
            print(f"{part}: {'ok' if not bad else 'FAILED'} in {result[part]['seconds']} s", flush=True)
        if bad and part == "messages":  # the rest is then of interest by torch's own backend only
            global TRANSPORTS
            TRANSPORTS = ("torch",)
    if rank == 0:
        print({p: r["ok"] for p, r in result.items()}, flush=True)
    os._exit(0)  # a rank whose peers are late would wait in NCCL's shutdown


if __name__ == "__main__":
    main()
