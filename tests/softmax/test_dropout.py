"""Dropout: one mask however the sequence is split, the same forward and backward, with the right expectation."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.softmax import attention
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.split_attention import KINDS, STRATEGIES

H, D, T = 4, 8, 61
CALL = dict(dropout_p=0.25, dropout_seed=1234)


def inputs() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, T, H, D, generator=rng, dtype=torch.float64) for _ in range(4)]


def whole(**more) -> list[torch.Tensor]:
    *qkv, do = inputs()
    leaves = [t.requires_grad_() for t in qkv]
    o = attention(*leaves, **CALL, **more).o
    return [o.detach(), *torch.autograd.grad((o * do).sum(), leaves)]


def check_split(rank: int, P: int) -> list[str]:
    cp = ring_la.ContextParallel(group(P), scan="ring")
    bad, want = [], whole()
    for kind in KINDS:
        layout = cp.layout(T, kind)
        for strategy in STRATEGIES:
            *qkv, do = (layout.shard(t) for t in inputs())
            leaves = [t.requires_grad_() for t in qkv]
            o = attention(*leaves, **CALL, layout=layout, strategy=strategy).o
            got = [o, *torch.autograd.grad((o * do).sum(), leaves)]
            errors = [error(g, layout.shard(w)) for g, w in zip(got, want)]
            bad += [f"{kind} {strategy} {e:.1e}" for e in errors if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [2, 4])
def test_one_mask_for_every_split(ranks, P):
    """Peers draw a mask per ring step from the device's generator: another split is another mask."""
    bad = ranks.run(P, check_split, P)
    assert not any(bad), bad


def test_backward_uses_the_forward_mask():
    """The peers lose the generator's state of each step, and their backward drops other weights."""
    x = [torch.randn(1, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, dropout_p=0.3, dropout_seed=5), x)


def test_share_dropped_and_expectation():
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 4000, 4, 8)
    v = torch.ones(1, 4000, 4, 8)
    o = attention(q, k, v, causal=False, dropout_p=0.25, dropout_seed=7).o
    assert (o - 1).abs().max() < 0.03
    assert o[0, 0, :, 0].unique().numel() > 1  # heads drop different keys
    other = attention(q, k, v, causal=False, dropout_p=0.25, dropout_seed=8).o
    assert not torch.equal(o, other)


def test_seed_comes_from_the_cpu_generator():
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    torch.manual_seed(3)
    first, second = (attention(q, k, v, dropout_p=0.5).o for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5).o)
    assert not torch.equal(first, second)
