"""short_conv and token_shift on split sequences against the token loop, also in shards shorter than the kernel."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la import reference
from tests.support.pool import group
from tests.support.recurrence_cases import DOCUMENTS, error

D = 6


def check_conv(rank: int, P: int, documents: str, W: int, with_state: bool) -> list[str]:
    T, cu = DOCUMENTS[documents]
    B = 2 if cu is None else 1
    N = B if cu is None else len(cu) - 1
    rng = torch.Generator().manual_seed(W)
    x, weight, bias, state, do, dfinal = (
        torch.randn(*s, generator=rng, dtype=torch.float64)
        for s in ((B, T, D), (D, W), (D,), (N, D, W - 1), (B, T, D), (N, D, W - 1))
    )
    cp = ring_la.ContextParallel(group(P), scan="ring")
    bad = []
    for op in ("short_conv", "token_shift"):
        if op == "token_shift":
            if W != 2:
                continue
            shapes = dict(weights={}, extra={}, state=state[..., 0], dfinal=dfinal[..., 0])
        else:
            shapes = dict(
                weights=dict(weight=weight, bias=bias), extra=dict(activation="silu"), state=state, dfinal=dfinal
            )
        whole = {"x": x, **shapes["weights"]} | ({"initial_state": shapes["state"]} if with_state else {})
        whole = {n: t.clone().requires_grad_() for n, t in whole.items()}
        want = getattr(reference, op)(**whole, **shapes["extra"], output_final_state=True, cu_seqlens=cu)
        loss = (want.o * do).sum() + (want.final_state * shapes["dfinal"]).sum()
        grads = dict(zip(whole, torch.autograd.grad(loss, list(whole.values()))))
        for kind in ("contiguous", "zigzag"):
            layout = cp.layout(T, kind, cu_seqlens=cu)
            local = {
                n: (layout.shard(t) if n == "x" else t).detach().clone().requires_grad_() for n, t in whole.items()
            }
            out = getattr(ring_la, op)(**local, **shapes["extra"], output_final_state=True, layout=layout)
            loss = (out.o * layout.shard(do)).sum() + (out.final_state * shapes["dfinal"]).sum() / P
            got = dict(zip(local, torch.autograd.grad(loss, list(local.values()))))
            for n in ("weight", "bias"):
                if n in got:
                    got[n] = cp.comm.all_reduce(got[n]).wait()
            pairs = {"o": (out.o, layout.shard(want.o)), "final": (out.final_state, want.final_state)}
            pairs |= {n: (got[n], layout.shard(grads[n]) if n == "x" else grads[n]) for n in got}
            bad += [
                f"{op} {kind} {n} {error(a, b):.1e}" for n, (a, b) in pairs.items() if b.numel() and error(a, b) > 1e-12
            ]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_split_convolution_is_whole(ranks, P, documents):
    for W in (1, 2, 4, 9):
        for with_state in (True, False):
            bad = ranks.run(P, check_conv, P, documents, W, with_state)
            assert not any(bad), bad


def check_one_message(rank: int) -> tuple[int, int]:
    """Bytes of the halo for q, k and v together, contiguous: W−1 rows to the right neighbour, and nothing else."""
    cp = ring_la.ContextParallel(group(), validate="never", scan="ring")
    layout = cp.layout(64, "contiguous")
    before = cp.comm.bytes_sent
    ring_la.short_conv(torch.randn(1, layout.local_length, 3 * D), torch.randn(3 * D, 4), layout=layout)
    return cp.comm.bytes_sent - before, 3 * 3 * D * 4 if rank < cp.size - 1 else 0


def test_one_message_carries_the_halo(ranks):
    for sent, expected in ranks.run(4, check_one_message):
        assert sent == expected


def check_final_state_of_one_rank(rank: int) -> float:
    """Only rank 0's loss uses the final state: the way back is collective all the same."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=60.0)
    layout = cp.layout(20, "contiguous")
    whole = torch.randn(1, 20, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.ones(D, 3, dtype=torch.float64)
    x = layout.shard(whole).requires_grad_()
    out = ring_la.short_conv(x, weight, layout=layout, output_final_state=True)
    (grad,) = torch.autograd.grad(out.o.sum() + (out.final_state.sum() if rank == 0 else 0), x)
    whole.requires_grad_()
    want = reference.short_conv(whole, weight, output_final_state=True)
    (expected,) = torch.autograd.grad(want.o.sum() + want.final_state.sum(), whole)
    return error(grad, layout.shard(expected))


def test_final_state_used_by_one_rank(ranks):
    assert max(ranks.run(2, check_final_state_of_one_rank)) < 1e-12


def test_one_device_matches_reference():
    x = torch.randn(1, 20, 2, 3, dtype=torch.float64)
    weight = torch.randn(6, 1, 4, dtype=torch.float64)
    cu = torch.tensor([0, 3, 3, 20])
    got = ring_la.short_conv(x, weight, cu_seqlens=cu, output_final_state=True)
    want = reference.short_conv(x, weight, cu_seqlens=cu, output_final_state=True)
    assert error(got.o, want.o) < 1e-12
    assert error(got.final_state, want.final_state) < 1e-12


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(x=torch.zeros(4, 6)), "x"),
        (dict(x=torch.zeros(1, 4, 6, dtype=torch.int64)), "x"),
        (dict(weight=torch.zeros(5, 4)), "weight"),
        (dict(bias=torch.zeros(5)), "bias"),
        (dict(bias=1.0), "bias"),
        (dict(activation="gelu"), "activation"),
        (dict(initial_state=torch.zeros(1, 6, 4)), "initial_state"),
        (dict(cu_seqlens=torch.tensor([0, 3])), "cu_seqlens"),
        (dict(layout="zigzag"), "layout"),
        (dict(output_final_state="yes"), "output_final_state"),
        (dict(in_place=None), "in_place"),
    ],
)
def test_bad_arguments_are_named(change, name):
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected"):
        ring_la.short_conv(**(dict(x=torch.zeros(1, 4, 6), weight=torch.zeros(6, 4)) | change))
