"""shard, gather, convert and targets among real ranks, with their gradients."""

from __future__ import annotations

import pytest
import torch

import ring_la
from tests.support.pool import group

CASES = [(29, None), (1003, None), (3, None), (40, (0, 0, 1, 17, 18, 40))]


def check_moves(rank: int, P: int, T: int, cu) -> None:
    cp = ring_la.ContextParallel(group(P), scan="ring")
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, 3, generator=rng, dtype=torch.float64)
    weights = torch.randn(P, 2, T, 3, generator=rng, dtype=torch.float64)
    layouts = {kind: cp.layout(T, kind, cu_seqlens=cu) for kind in ("contiguous", "zigzag", "striped")}
    for kind, layout in layouts.items():
        whole = x.clone().requires_grad_()
        local = layout.shard(whole)
        assert torch.equal(local, x[:, layout.tokens()])
        local = local.detach().requires_grad_()
        gathered = layout.gather(local)
        assert torch.equal(gathered, x)
        (grad,) = torch.autograd.grad((gathered * weights[rank]).sum(), local)
        torch.testing.assert_close(grad, weights.sum(0)[:, layout.tokens()])
        (grad,) = torch.autograd.grad(layout.shard(whole).sum(), whole)
        owned = torch.zeros(T, dtype=torch.float64)
        owned[layout.tokens()] = 1
        assert torch.equal(grad, owned[None, :, None].expand_as(grad))
        for other in layouts.values():
            moved = layout.convert(local, other)
            assert torch.equal(moved, x[:, other.tokens()]), (kind, other.kind)
            (grad,) = torch.autograd.grad((moved * weights[0][:, other.tokens()]).sum(), local)
            assert torch.equal(grad, weights[0][:, layout.tokens()])
        assert torch.equal(layout.gather(local.movedim(1, 2), dim=2), x.movedim(1, 2))


def check_targets(rank: int, P: int, T: int, cu) -> None:
    cp = ring_la.ContextParallel(group(P), scan="ring")
    ids = torch.arange(100, 100 + T)[None].repeat(2 if cu is None else 1, 1)
    want = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -7)], 1)
    for end in (cu or (0, T))[1:]:
        if end:
            want[:, end - 1] = -7
    for kind in ("contiguous", "zigzag", "striped"):
        layout = cp.layout(T, kind, cu_seqlens=cu)
        got = layout.targets(layout.shard(ids), ignore_index=-7)
        assert got.dtype == ids.dtype
        assert torch.equal(got, layout.shard(want)), kind
        flat = layout.targets(layout.shard(ids[0], dim=0), ignore_index=-7)
        assert torch.equal(flat, layout.shard(want[0], dim=0))
        first = torch.tensor((cu or (0, T))[:-1])
        positions = torch.arange(T) - torch.tensor([max(f for f in first.tolist() if f <= t) for t in range(T)])
        assert torch.equal(layout.positions, positions[layout.tokens()])


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize(("T", "cu"), CASES)
def test_shard_gather_convert_and_targets_are_right_both_ways(ranks, P, T, cu):
    ranks.run(P, check_moves, P, T, cu)
    ranks.run(P, check_targets, P, T, cu)


def check_bad_moves(rank: int) -> None:
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout, longer = cp.layout(12), cp.layout(14)
    with pytest.raises(ring_la.ArgumentError, match=r"^x: expected 12 along dimension 1"):
        layout.shard(torch.zeros(1, 13, 2))
    with pytest.raises(ring_la.ArgumentError, match=r"^x: expected"):
        layout.gather(torch.zeros(1, 13, 2))
    with pytest.raises(ring_la.ArgumentError, match="other_layout"):
        layout.convert(torch.zeros(1, layout.local_length), longer)
    n = layout.local_length
    for ids in (torch.zeros(1, 99, dtype=torch.int64), torch.zeros(1, n), torch.zeros(1, n, dtype=torch.uint8), [1]):
        with pytest.raises(ring_la.ArgumentError, match=r"^ids: expected"):
            layout.targets(ids)
    with pytest.raises(ring_la.ArgumentError, match=r"^dim: expected an int, got '1'"):
        layout.gather(torch.zeros(1, n), dim="1")
    ids = torch.arange(n)[None]
    with pytest.raises(ring_la.ArgumentError, match=r"^ids: expected a dense tensor with values, got .*meta device"):
        layout.targets(ids.to("meta"))
    layout.targets(ids)  # nothing that is kept for the layout went to the meta device
    for bad in (3, None, torch.zeros(2, device="meta")):
        with pytest.raises(ring_la.ArgumentError, match=r"^x: expected a dense tensor with values"):
            cp.sum_over_ranks(bad)


def check_elsewhere(rank: int) -> None:
    """What messages cannot be made of, on one rank, is refused on both before anything is sent."""
    layout = ring_la.ContextParallel(group(2), scan="ring", timeout=60).layout(23, "contiguous")
    other, x = layout.cp.layout(23, "zigzag"), torch.zeros(1, layout.local_length, 1, 2, 2)
    calls = [
        ("x", layout.gather),
        ("x", lambda t: layout.convert(t, other)),
        ("ids", lambda t: layout.targets(t.long())),
    ]
    for name, call in (*calls, ("b", lambda t: layout.cp.scan(None, t, layout))):
        for bad in (x.to("meta"), x.to_sparse()):
            with pytest.raises(ring_la.DisagreementError, match=f"rank 1: .*refused: {name}: expected a dense"):
                call(bad if rank else x)


def test_tensors_elsewhere_are_refused_on_every_rank(ranks):
    ranks.run(2, check_elsewhere)


def test_bad_moves_are_named(ranks):
    ranks.run(2, check_bad_moves)


def check_alone(rank: int) -> list[bool]:
    """Rank 0 alone gives what is refused, and hears why; so does the other."""
    cp, said = ring_la.ContextParallel(group(2), scan="ring", timeout=20), []
    layout, grid = cp.layout(13), cp.grid((5, 3))
    x, rows = torch.zeros(1, layout.local_length, 2), torch.zeros(1, grid.local_shape[0], 3)
    A, b = torch.zeros(1, layout.local_length, 1), torch.zeros(1, layout.local_length, 1, 1, 1)
    calls = [
        ("other_layout", lambda given: layout.convert(x, given), None, layout),
        ("other_layout", lambda given: layout.convert(x, given), cp.layout(14), layout),
        ("dim", lambda given: layout.gather(x, given), True, 1),
        ("width", lambda given: grid.halo(rows, 1, given), -1, 1),
        ("width", lambda given: grid.halo(rows, 1, given), True, 1),
        ("shape", cp.grid, (0, 3), (5, 3)),
        ("shape", cp.grid, 5, (5, 3)),
        ("counts", lambda given: cp.grid((5, 3), given), (1, 1), None),
        ("A", lambda given: cp.scan(given, b, layout), A.to_sparse(), A),
    ]
    for name, call, wrong, right in calls:
        with pytest.raises((ring_la.ArgumentError, ring_la.DisagreementError)) as error:
            call(right if rank else wrong)
        said.append(f"{name}: expected" in str(error.value))
    return said


def test_what_one_rank_gives_wrong_is_said_on_both(ranks):
    assert ranks.run(2, check_alone) == [[True] * 9] * 2
