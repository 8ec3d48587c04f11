"""Symmetric memory as a transport, over all GPUs: `pytest -m gpu tests/gpu/test_symmetric.py`.

    messages    every pattern of `Group`, equal to NCCL's to the bit, under delays that make ranks drift apart
    strategies  every recurrence of a few × scan × layout, fp64, against the token loop (1e-9), and bytes as NCCL's
    links       the ring by one kernel a link, every kind of map and chain, against the serial recursion in fp64
    graph       forward and backward of a sharded call captured and replayed on new inputs, equal to the eager call
    borders     recurrences whose kernels exchange states among their own launches, bf16 and fp32, against one device
                in fp64: zigzag, packed, several rows, with states; replayed, and captured
    words       messages of another call arrive as NaN, and the next call raises
    halos       a split convolution under transport="auto", whose halo goes by mailboxes, beside the whole one
    canonical   deterministic=True under transport="auto": the same bits on 1 GPU and on all

Peers that do not send: test_late_peers.py. What all this costs: benchmarks/symmetric.py.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ring_la
from ring_la.algebra import Affine, transpose
from ring_la.comm import Group
from ring_la.errors import DisagreementError
from ring_la.layout import Layout
from ring_la.scan import STRATEGIES, Chain, Link, MailboxBorder
from tests.support import border_calls as border
from tests.support import chain_maps as mailbox
from tests.support import pool
from tests.support import split_recurrences as sharded
from tests.support.gpu import ranks
from tests.support.recurrence_cases import make_inputs
from tests.support.split_calls import both_ways, captured, inputs

pytestmark = pytest.mark.gpu(needs=2)

TRANSPORTS = ("torch", "symmetric")
RECURRENCES = ("simple_gla", "gla", "gated_delta_rule", "retention")
BORDERS = (
    ("linear_attention", "contiguous", torch.bfloat16),
    ("simple_gla", "documents", torch.bfloat16),
    ("retention", "zigzag", torch.bfloat16),
    ("gla", "rows", torch.float32),
    ("gated_delta_rule", "documents", torch.bfloat16),
    ("kda", "zigzag", torch.bfloat16),
    ("delta_rule", "rows", torch.float32),
    ("delta_rule", "folded", torch.float32),
)


def groups() -> dict[str, Group]:
    return {t: Group(pool.group(), timedelta(seconds=60), t) for t in TRANSPORTS}


@functools.lru_cache
def context(P: int, scan: str, transport: str) -> ring_la.ContextParallel:
    if transport == "auto" and torch.cuda.device_count() < P:
        transport = "symmetric"  # ranks that share a GPU have mailboxes where they are asked for alone
    return ring_la.ContextParallel(pool.group(P), scan=scan, transport=transport)


def check_messages(rank: int) -> int:
    """Every pattern by both transports, equal; ranks are delayed at random, so that some run ahead."""
    by = groups()
    P, device = by["torch"].size, by["torch"].device
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
    return checked


def test_messages(gpu_ranks, record_property):
    compared = gpu_ranks.run(gpu_ranks.size, check_messages)
    record_property("compared", compared[0])
    assert len(set(compared)) == 1
    assert compared[0] > 100


def check_words(rank: int) -> tuple[list[bool], str]:
    """Ranks that send in different calls, which no log sees: what arrives of which rank, and the error."""
    g = groups()["symmetric"]
    assert g.all_gather(torch.ones(8, device=g.device)).wait().eq(1).all()
    g.transport.word = lambda: 5 + 2 * rank
    rows = g.all_gather(torch.ones(8, device=g.device)).wait()
    missing = rows.isnan().all(1).tolist()
    with pytest.raises(DisagreementError) as caught:
        g.all_gather(torch.ones(8, device=g.device))
    return missing, str(caught.value)


def test_a_message_of_another_call_is_told_by_its_word(gpu_ranks):
    P = gpu_ranks.size
    for rank, (missing, error) in enumerate(gpu_ranks.run(P, check_words)):
        assert missing == [r != rank for r in range(P)]
        assert f"rank {rank} got a message of another one" in error


def check_strategies(
    rank: int, P: int, name: str, documents: str, kind: str
) -> tuple[dict[str, float], dict[str, int]]:
    """Worst error and bytes sent, by transport."""
    worst, sent, shared = {}, {}, sharded.context
    try:
        for transport in TRANSPORTS:
            sharded.context = functools.partial(context, transport=transport)
            comms = [context(P, scan, transport).comm for scan in STRATEGIES]
            before = sum(c.bytes_sent for c in comms)
            errors = sharded.check_sharded(rank, P, name, documents, kind, tuple(STRATEGIES))
            sent[transport] = sum(c.bytes_sent for c in comms) - before
            worst[transport] = max(e for by in errors.values() for e in by.values())
    finally:
        sharded.context = shared
    return worst, sent


@pytest.mark.parametrize(("documents", "kind"), [("packed", "zigzag"), ("uneven", "contiguous")])
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("P", sorted({2, ranks(2)}))
def test_strategies(P, name, documents, kind, gpu_ranks, record_property):
    found = gpu_ranks.run(P, check_strategies, P, name, documents, kind)
    record_property("worst", {t: max(worst[t] for worst, _ in found) for t in TRANSPORTS})
    for worst, sent in found:
        assert max(worst.values()) < 1e-9
        assert len(set(sent.values())) == 1, "both transports send as many bytes"


def check_links(rank: int, kind: str) -> float:
    """The worst error of the ring's links."""
    g, shape, worst = Group(pool.group(), timedelta(seconds=60), "symmetric"), (1, 32, 128, 128), 0.0
    random = torch.Generator().manual_seed(rank)
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
    assert g.transport.late() == []
    return worst


@pytest.mark.parametrize("kind", ["identity", "scalar", "diagonal", "dense"])
def test_links(kind, gpu_ranks, record_property):
    worst = max(gpu_ranks.run(gpu_ranks.size, check_links, kind))
    record_property("worst", worst)
    assert worst < 1e-6


def check_borders(rank: int, name: str, kind: str, dtype: torch.dtype) -> tuple[dict[str, float], int]:
    """Errors of everything a call computes, and how many of its exchanges went by mailboxes."""
    begun, begin = [], MailboxBorder.begin
    MailboxBorder.begin = lambda self, size, reverse: (begun.append(size), begin(self, size, reverse))[1]
    cp = context(dist.get_world_size(), "ring", "auto")
    shape = dict(Hk=2, H=4, K=64, V=128) if kind == "zigzag" else dict(Hk=4, H=4, K=128, V=128)
    try:
        first(functools.partial(compiled, name, dtype, **shape))
        return border.errors(cp, name, kind, 9, dtype, **shape), len(begun)
    finally:
        MailboxBorder.begin = begin


@pytest.mark.parametrize(("name", "kind", "dtype"), BORDERS)
def test_borders(name, kind, dtype, gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_borders, name, kind, dtype)
    worst = {n: max(errors[n] for errors, _ in found) for n in found[0][0]}
    record_property("errors", worst)
    assert max(worst.values()) < (2e-2 if dtype == torch.bfloat16 else 1e-4), worst
    assert {begun for _, begun in found} == {10}, "not by mailboxes"


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


def check_graph(rank: int, transport: str, name: str, scan: str, T: int = 4096, H: int = 32) -> float:
    """How far a replay on new inputs is from the eager call on them."""
    cp = context(dist.get_world_size(), scan, transport)
    layout = cp.layout(T * cp.size, "contiguous")
    x, new, do = inputs(name, T, H, 0), inputs(name, T, H, 1), torch.randn(1, T, H, 128, device="cuda").bfloat16()
    first(functools.partial(both_ways, name, x, do, None))
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
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True))


def graphs() -> list[tuple[str, str, str]]:
    """(transport, recurrence, strategy); under "auto" the ring's exchanges are launches among the kernel's own."""
    scans = {"symmetric": tuple(STRATEGIES), "torch": ("ring", "all_gather"), "auto": ("ring",)}
    names = ("simple_gla", "gated_delta_rule")
    return [(transport, name, scan) for transport, some in scans.items() for name in names for scan in some]


@pytest.mark.parametrize(("transport", "name", "scan"), graphs())
def test_graph(transport, name, scan, gpu_ranks, record_property):
    worst = max(gpu_ranks.run(gpu_ranks.size, check_graph, transport, name, scan))
    record_property("worst", worst)
    assert worst < 1e-2


def check_halos(rank: int, kind: str) -> float:
    """The worst error of a split convolution beside the whole one, eager and as a graph on other inputs."""
    cp, D, T, worst = context(dist.get_world_size(), "ring", "auto"), 1024, 512, 0.0
    draw = torch.Generator("cuda").manual_seed(0)
    layout = cp.layout(T * cp.size, kind)
    inputs = [torch.randn(2, 1, T * cp.size, D, generator=draw, device="cuda") for _ in range(2)]
    w = torch.randn(D, 4, generator=draw, device="cuda", requires_grad=True)
    x, do = (layout.shard(t[0]) for t in inputs)
    x.requires_grad_()

    def split() -> list[torch.Tensor]:
        o = ring_la.short_conv(x, w, None, "silu", layout=layout).o
        return [o, *torch.autograd.grad(o, (x,), do)]

    kept: list[torch.Tensor] = []
    replay = captured(lambda: kept.__setitem__(slice(None), split()))
    for n in range(2):
        whole, dwhole = (t[n].clone() for t in inputs)
        with torch.no_grad():
            x.copy_(layout.shard(whole)), do.copy_(layout.shard(dwhole))
        replay()
        whole.requires_grad_()
        o = ring_la.short_conv(whole, w, None, "silu").o
        want = [layout.shard(t) for t in (o, *torch.autograd.grad(o, (whole,), dwhole))]
        for got in (kept, split()):
            worst = max(worst, *(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)))
    assert cp.comm.mailboxes.late() == []
    return worst


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_halos(kind, gpu_ranks, record_property):
    worst = max(gpu_ranks.run(gpu_ranks.size, check_halos, kind))
    record_property("worst", worst)
    assert worst < 1e-6


def check_canonical(rank: int, name: str) -> tuple[bool, bool]:
    """Whether output and final state have the same bits on one GPU and on all."""
    P, T = dist.get_world_size(), 1024
    alone = [dist.new_group([rank]) for rank in range(P)][dist.get_rank()]
    make = functools.partial(ring_la.ContextParallel, deterministic=True, transport="auto", validate="never")
    split, one = make(pool.group(P)), make(alone)
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
    return torch.equal(layout.shard(whole.o), mine.o), torch.equal(whole.final_state, mine.final_state)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_canonical(name, gpu_ranks):
    assert gpu_ranks.run(gpu_ranks.size, check_canonical, name) == [(True, True)] * gpu_ranks.size
