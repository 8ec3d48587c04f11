"""Grids of tokens split by whole slices, their halos, and scans of affine maps over ranks: as on one device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_la
from ring_la.errors import DisagreementError, RingLAError
from ring_la.recurrences import run
from tests.support.attention_cases import error
from tests.support.pool import group


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check_halo(rank: int, P: int, counts: tuple[int, ...] | None) -> float:
    """Two convolutions whose rows are split, and the gradients of image and weights."""
    cp = ring_la.ContextParallel(group(P), scan="ring", timeout=60)
    x, a, b = draw(2, 3, 7, 4), draw(3, 3, 1, 1, seed=1), draw(3, 3, 5, 3, seed=2)
    want = F.conv2d(F.conv2d(x, a).tanh(), b, padding=(2, 1))
    loss = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
    grads = torch.autograd.grad((want * loss).sum(), (x, a, b))
    grid = cp.grid((7, 4), counts)
    rows = F.conv2d(grid.slices.shard(x, 2), a).tanh()
    coming = grid.halo(rows, 2, 2)
    wide = torch.cat([coming.wait()[0], rows, coming.wait()[1]], 2)
    got = F.conv2d(wide, b, padding=(0, 1))
    mine = torch.autograd.grad((got * grid.slices.shard(loss, 2)).sum(), (x, a, b))
    for g in mine:
        dist.all_reduce(g, group=group(P))
    whole = grid.slices.gather(got.detach(), 2)
    return max(error(g, w) for g, w in zip((whole, *mine), (want, *grads)))


@pytest.mark.parametrize(("P", "counts"), [(1, None), (3, None), (4, (1, 4, 1, 1))])
def test_rows_with_a_halo_are_the_whole_image(ranks, P, counts):
    assert max(ranks.run(P, check_halo, P, counts)) < 1e-12


def check_bytes(rank: int) -> list[int]:
    """Bytes sent for a halo of two image sizes."""
    cp, sent = ring_la.ContextParallel(group(4), scan="ring", timeout=60), []
    for rows in (8, 32):
        grid = cp.grid((rows, 6))
        x = torch.zeros(1, 3, rows // 4, 6)
        grid.halo(x, 2).wait()
        before = cp.comm.bytes_sent
        grid.halo(x, 2).wait()
        sent.append(cp.comm.bytes_sent - before)
    return sent


def test_a_halo_goes_to_neighbours_alone(ranks):
    row = 3 * 6 * 4
    assert ranks.run(4, check_bytes) == [[row] * 2, [2 * row] * 2, [2 * row] * 2, [row] * 2]


# -- scans -------------------------------------------------------------------------------------------------

SHAPES = {"identity": None, "scalar": (), "diagonal": (3,), "dense": (3, 3)}


def by_steps(A, b, cu, reverse: bool, exclusive: bool) -> torch.Tensor:
    """A step at a time, documents one by one."""
    out: list = [None] * b.shape[1]
    for first, last in zip(cu, cu[1:]):
        S = torch.zeros_like(b[:, 0])
        for t in reversed(range(first, last)) if reverse else range(first, last):
            before = S
            if A is not None:
                a = A[:, t]
                S = a @ S if a.dim() == 4 else a.reshape(*a.shape, *[1] * (4 - a.dim())) * S
            S = S + b[:, t]
            out[t] = before if exclusive else S
    return torch.stack(out, 1)


def check_scan(rank: int, P: int, how: dict) -> list[str]:
    cp, T, bad = ring_la.ContextParallel(group(P), scan=how.get("scan", "ring"), timeout=60), 11, []
    cu = how.get("cu")
    layout = cp.layout(T, how.get("kind", "contiguous"), cu)
    for kind, tail in SHAPES.items():
        b = draw(2 if cu is None else 1, T, 2, 3, 2)
        A = None if tail is None else (draw(*b.shape[:3], *tail, seed=1) * 0.6).detach().requires_grad_()
        leaves = [x for x in (A, b) if x is not None]
        for reverse, exclusive in ((False, False), (True, True), (False, True), (True, False)):
            want = by_steps(A, b, cu or (0, T), reverse, exclusive)
            loss = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
            grads = torch.autograd.grad((want * loss).sum(), leaves)
            local = [None if x is None else layout.shard(x) for x in (A, b)]
            got = cp.scan(*local, layout, reverse=reverse, exclusive=exclusive)
            mine = torch.autograd.grad((got * layout.shard(loss)).sum(), leaves)
            for g in mine:
                dist.all_reduce(g, group=group(P))
            e = max(error(g, w) for g, w in zip((layout.gather(got), *mine), (want, *grads)))
            bad += [] if e < 1e-12 else [f"{kind} {reverse} {exclusive}: {e:.1e}"]
    return bad


CASES = [
    (1, {}),
    (3, {}),
    (4, {"kind": "zigzag", "scan": "all_gather"}),
    (3, {"kind": "zigzag", "cu": (0, 2, 7, 7, 11), "scan": "doubling"}),
    (2, {"cu": (0, 6, 11), "scan": "all_to_all"}),
]


@pytest.mark.parametrize(("P", "how"), CASES, ids=str)
def test_scans_over_ranks_are_step_by_step(ranks, P, how):
    assert not any(ranks.run(P, check_scan, P, how))


def test_scan_on_one_device_in_bf16():
    A, b = draw(1, 9, 2, 3, 3).detach().bfloat16() * 0.3, draw(1, 9, 2, 3, 2, seed=1).detach().bfloat16()
    A, b = A.requires_grad_(), b.requires_grad_()
    got = ring_la.ContextParallel.scan(None, A, b)
    assert got.dtype == torch.float32
    assert error(got, by_steps(A.double(), b.double(), (0, 9), False, False)) < 1e-6
    assert [g.dtype for g in torch.autograd.grad(got.sum(), (A, b))] == [torch.bfloat16] * 2


def check_refusals(rank: int) -> list[str]:
    cp, bad = ring_la.ContextParallel(group(2), scan="ring", timeout=60), []
    grid, b = cp.grid((5, 3)), torch.zeros(1, 5, 1, 2, 2)

    def expect(words: str, call, kind: type = RingLAError) -> None:
        try:
            call()
            bad.append(f"{words}: accepted")
        except kind as e:
            bad.extend([] if words in str(e) else [f"{words}: {e}"])

    mine = grid.slices.shard(b)
    expect("shape: ", lambda: cp.grid((5, 0)))
    expect("counts: expected 2 numbers whose sum is 5", lambda: cp.grid((5, 3), (2, 2)))
    expect("counts=", lambda: cp.grid((5, 3), (2, 3) if rank else (3, 2)), DisagreementError)
    expect("width: ", lambda: grid.halo(mine, 1, -1))
    expect("width", lambda: grid.halo(mine, 1, 1 + rank), DisagreementError)
    expect("A: expected", lambda: cp.scan(mine[..., :1], mine, grid.slices))
    expect("b: expected this rank's tokens", lambda: cp.scan(None, b, grid.slices))
    expect("reverse", lambda: cp.scan(None, mine, grid.slices, reverse=bool(rank)), DisagreementError)
    expect('"striped"', lambda: cp.scan(None, b[:, : 3 - rank], cp.layout(5, "striped")))
    return bad


def test_refusals(ranks):
    assert ranks.run(2, check_refusals) == [[], []]


# -- a denominator of its own --------------------------------------------------------------------------------


def check_normalizer(rank: int, P: int, cu: tuple[int, ...] | None) -> list[float]:
    cp = ring_la.ContextParallel(group(P), scan="ring", timeout=60)
    layout = cp.layout(11, "contiguous", cu)
    q, k, q2, k2 = (draw(1, 11, 2, 3, seed=n).detach().abs().requires_grad_() for n in range(4))
    v = draw(1, 11, 2, 4, seed=9)
    leaves, how = (q, k, v, q2, k2), dict(causal=False, normalize=True, scale=1.0, eps=1e-15)
    parts = []
    for first, last in zip(cu or (0, 11), (cu or (0, 11))[1:]):
        one = slice(first, last)
        num = torch.einsum("bthk,bshk,bshv->bthv", q[:, one], k[:, one], v[:, one])
        parts.append(num / torch.einsum("bthk,bshk->bth", q2[:, one], k2[:, one])[..., None])
    want = torch.cat(parts, 1)
    loss = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
    grads = torch.autograd.grad((want * loss).sum(), leaves)
    mine = [layout.shard(x) for x in leaves]
    before = cp.comm.bytes_sent
    got = ring_la.linear_attention(*mine[:3], normalizer_q=mine[3], normalizer_k=mine[4], layout=layout, **how).o
    sent = cp.comm.bytes_sent - before
    back = torch.autograd.grad((got * layout.shard(loss)).sum(), leaves)
    for g in back:
        dist.all_reduce(g, group=group(P))
    alone = ring_la.linear_attention(
        q, k, v, normalizer_q=q2, normalizer_k=k2, cu_seqlens=torch.tensor(cu) if cu else None, **how
    ).o
    errors = [error(g, w) for g, w in zip((alone, layout.gather(got), *back), (want, want, *grads))]
    states = 1 if cu is None else len(cu) - 1
    return [*errors, 0.0 if sent == states * 2 * 2 * 3 * 5 * 8 * (P - 1) // P else sent]


@pytest.mark.parametrize(("P", "cu"), [(1, None), (3, None), (2, (0, 4, 11))])
def test_a_denominator_of_its_own_in_one_exchange(ranks, P, cu):
    assert max(map(max, ranks.run(P, check_normalizer, P, cu))) < 1e-10


def count_comparisons(rank: int) -> int:
    """How often ranks compare two calls alike, with a denominator of its own."""
    cp = ring_la.ContextParallel(group(2), scan="ring", timeout=60)
    layout = cp.grid((4, 3))
    q, k, v, nq, nk = (torch.rand(1, layout.local_length, 2, 4) for _ in range(5))
    with mock.patch.object(run, "agree", side_effect=run.agree) as agree:
        for _ in range(2):
            own = dict(normalizer_q=nq, normalizer_k=nk)
            ring_la.linear_attention(q, k, v, causal=False, normalize=True, layout=layout, **own)
    return agree.call_count


def test_calls_with_a_denominator_of_its_own_are_compared_once(ranks):
    assert ranks.run(2, count_comparisons) == [1, 1]
