"""The Functions and entry points of yunchang and ring-flash-attn against the dense reference."""

from __future__ import annotations

import pytest
import torch

from ring_la.integrations import ring_flash_attn, yunchang
from ring_la.integrations.yunchang.packed import flat_lse
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.yunchang_cases import (
    DENSE,
    DOCUMENTS,
    MASKS,
    D,
    T,
    compare,
    draw,
    leaves_of,
    packed_places,
    places,
    truth,
)


def check_dense(rank: int, P: int) -> list[str]:
    bad = []
    for kind, (_, function) in DENSE.items():
        at = places(kind, rank, P)
        for heads in ((4, 4), (4, 2)):
            tensors = draw(heads)
            for name, (theirs, ours) in MASKS.items():
                leaves, do = leaves_of(tensors, at)
                out, lse, nothing = function(*leaves, **theirs, return_attn_probs=True, group=group(P))
                assert nothing is None
                got = [out, lse, *torch.autograd.grad((out * do).sum(), leaves)]
                errors = compare(got, truth(tensors, **ours), at)
                bad += [f"{kind} {heads} {name} {i} {e:.1e}" for i, e in enumerate(errors) if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_dense_functions(ranks, P):
    """P = 1: yunchang's backward sends to itself at world size 1. Windows: yunchang and ring-flash-attn give the window
    to each block without its offset."""
    bad = ranks.run(P, check_dense, P)
    assert not any(bad), bad


def check_varlen(rank: int, P: int) -> list[str]:
    bad = []
    rng = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, T, h, D, generator=rng, dtype=torch.float64) for h in (4, 2, 2, 4)]
    cu = torch.tensor(DOCUMENTS) // P
    for kind, function in (
        ("contiguous", yunchang.ring_flash_attn_varlen_func),
        ("zigzag", yunchang.zigzag_ring_flash_attn_varlen_func),
        ("zigzag", ring_flash_attn.zigzag_ring_flash_attn_varlen_func),
    ):
        at = packed_places(kind, rank, P)
        for name in ("causal", "full", "window"):
            theirs, ours = MASKS[name]
            *leaves, do = (t[0, at].clone().requires_grad_() for t in tensors)
            longest = int(cu.diff().max())
            out, lse, _ = function(*leaves, cu, longest, **theirs, return_attn_probs=True, group=group(P))
            assert list(lse.shape) == [3, 4, longest]
            got = [out[None], flat_lse(lse, cu.tolist())[None]]
            got += [g[None] for g in torch.autograd.grad((out * do).sum(), leaves)]
            errors = compare(got, truth(tensors, DOCUMENTS, **ours), at)
            bad += [f"{kind} {name} {i} {e:.1e}" for i, e in enumerate(errors) if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 2, 4])
def test_varlen_functions(ranks, P):
    bad = ranks.run(P, check_varlen, P)
    assert not any(bad), bad


def check_llama3(rank: int, P: int) -> list[str]:
    bad = []
    rng = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, T, h, D, generator=rng, dtype=torch.float64) for h in (4, 2, 2, 4)]
    for cu in ((0, 5, 31, 48), (0, 48), (0, 24, 48)):
        at = places("contiguous", rank, P)
        for causal in (True, False):
            prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu), causal, rank, P)
            q_cu, k_cu, longest_q, longest_k, keys = prepared
            *leaves, do = (t[0, at].clone().requires_grad_() for t in tensors)
            window = dict(window_size=(9, 0 if causal else 4))
            for more, ours in ((dict(), dict()), (window, dict(window=window["window_size"]))):
                lengths = (q_cu, k_cu, longest_q, longest_k, 1, keys)
                out = ring_flash_attn.llama3_flash_attn_varlen_func(
                    *leaves, *lengths, causal=causal, **more, group=group(P)
                )
                got = [out[None], None, *(g[None] for g in torch.autograd.grad((out * do).sum(), leaves))]
                want = truth(tensors, cu, causal=causal, **ours)
                errors = [error(g, w[:, at]) for g, w in zip(got, want) if g is not None]
                bad += [f"{cu} {causal} {more} {i} {e:.1e}" for i, e in enumerate(errors) if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 3, 4])
def test_llama3_functions(ranks, P):
    bad = ranks.run(P, check_llama3, P)
    assert not any(bad), bad
