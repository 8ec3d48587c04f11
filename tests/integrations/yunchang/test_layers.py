"""yunchang's layers, and the entry of their registry."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from ring_la import reference
from ring_la.errors import RingLAError
from ring_la.integrations import xdit, yunchang
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.yunchang_cases import (
    MASKS,
    B,
    D,
    H,
    T,
    draw,
    leaves_of,
    places,
    truth,
)


def check_layers(rank: int, low: bool) -> list[str]:
    yunchang.set_seq_parallel_pg(2, 2, rank, 4, use_ulysses_low=low)
    bad, tensors = [], draw((4, 2))
    for impl in ("basic", "zigzag", "strip"):
        for name, (theirs, ours) in MASKS.items():
            extract = yunchang.EXTRACT_FUNC_DICT[impl]
            order = dist.get_rank(yunchang.PROCESS_GROUP.RING_PG) * 2 + dist.get_rank(yunchang.PROCESS_GROUP.ULYSSES_PG)
            at = extract(torch.arange(T)[None], order, 4, rd=2, ud=2)[0]
            leaves, do = leaves_of(tensors, at)
            layer = yunchang.LongContextAttention(ring_impl_type=impl)
            out = layer(*leaves, **theirs)
            got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
            errors = [error(g, w[:, at]) for g, w in zip(got, truth(tensors, **ours)) if g is not None]
            bad += [f"{impl} {name} {i} {e:.1e}" for i, e in enumerate(errors) if e > 1e-9]
    whole = draw()
    at = places("contiguous", dist.get_rank(yunchang.PROCESS_GROUP.RING_PG) * 2, 4)
    at = yunchang.basic_extract_local(torch.arange(T)[None], order, 4)[0]
    leaves, do = leaves_of(whole, at)
    out = yunchang.LongContextAttentionQKVPacked()(torch.stack(leaves, 2), causal=True)
    bad += [] if error(out, truth(whole, causal=True)[0][:, at]) < 1e-9 else ["qkvpacked"]
    bad += [] if torch.equal(out, yunchang.AsyncLongContextAttention()(*leaves, causal=True)) else ["async"]
    return bad


@pytest.mark.parametrize("low", [True, False])
def test_long_context_attention(ranks, low):
    bad = ranks.run(4, check_layers, low)
    assert not any(bad), bad


def check_ulysses(rank: int) -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensors = [t + rank // 2 for t in draw((4, 2))]  # the two pairs work on different sequences
    at = places("contiguous", rank % 2, 2)
    leaves, do = leaves_of(tensors, at)
    out = yunchang.UlyssesAttention(pairs[rank // 2])(*leaves, causal=True)
    got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
    return [error(g, w[:, at]) for g, w in zip(got, truth(tensors, causal=True)) if g is not None]


def test_ulysses_stays_in_its_group(ranks):
    """yunchang's UlyssesAttention on PyTorch kernels runs a ring over the whole world inside each group."""
    assert all(e < 1e-9 for errors in ranks.run(4, check_ulysses) for e in errors)


def check_ulysses_alone(rank: int) -> float:
    q, k, v, _ = draw()
    o = yunchang.UlyssesAttention(group(1))(q, k, v, causal=True)
    return error(o, truth(draw(), causal=True)[0])


def test_ulysses_of_one_rank(ranks):
    """A group of one was an AttributeError."""
    assert ranks.run(1, check_ulysses_alone)[0] < 1e-9


def check_copies(rank: int) -> None:
    yunchang.PROCESS_GROUP.RING_PG = yunchang.PROCESS_GROUP.ULYSSES_PG = group(1)
    for layer in (yunchang.LongContextAttention(), yunchang.UlyssesAttention(group(1)), xdit.LongContextAttention()):
        other = copy.deepcopy(torch.nn.ModuleList([layer, layer]))
        assert other[0] is other[1] is not layer
        assert [id(x) for x in vars(other[0]).values() if isinstance(x, dist.ProcessGroup)] == [
            id(x) for x in vars(layer).values() if isinstance(x, dist.ProcessGroup)
        ]
        assert other[0]._modules is not layer._modules


def test_copies_share_the_groups(ranks):
    """An average of weights is a deep copy of the model, and groups cannot be copied."""
    ranks.run(1, check_copies)


def check_joint(rank: int, where: str) -> list[float]:
    yunchang.set_seq_parallel_pg(2, 2, rank, 4)
    tensors, at = draw(), places("contiguous", rank, 4)
    rng = torch.Generator().manual_seed(9)
    joint = [torch.randn(B, 5, H, D, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(3)]
    do_joint = torch.randn(B, 5, H, D, generator=rng, dtype=torch.float64)
    leaves, do = leaves_of(tensors, at)
    layer = xdit.LongContextAttention()
    names = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")
    out = layer(None, *leaves, **dict(zip(names, joint)), joint_strategy=where)
    o, o_joint = (out[:, :-5], out[:, -5:]) if where == "rear" else (out[:, 5:], out[:, :5])
    got = torch.autograd.grad((o * do).sum() + (o_joint * do_joint).sum() / 4, [*leaves, *joint])
    parts = []
    for g in got[3:]:
        total = g.clone()
        dist.all_reduce(total)
        parts.append(total)

    *qkv, whole_do = tensors
    whole = [t.clone().requires_grad_() for t in [*qkv, *joint]]
    every = [torch.cat([a, b], 1) for a, b in zip(whole[:3], whole[3:])]
    want = reference.attention(*every, causal=False).o
    grads = torch.autograd.grad((want[:, :T] * whole_do).sum() + (want[:, T:] * do_joint).sum(), whole)
    pairs = [(o, want[:, :T][:, at]), (o_joint, want[:, T:])]
    pairs += [(g, w[:, at]) for g, w in zip(got[:3], grads[:3])] + list(zip(parts, grads[3:]))
    return [error(g, w) for g, w in pairs]


@pytest.mark.parametrize("where", ["front", "rear"])
def test_joint_tensors_have_gradients(ranks, where):
    """xDiT's ring gives no gradient to joint keys and values: its backward never sees them."""
    assert all(e < 1e-9 for errors in ranks.run(4, check_joint, where) for e in errors)


def test_xdit_s_registry_calls_an_entry_as_its_own():
    """As xDiT 0.7's USP calls an entry: everything but q, k and v by name, `attention_kwargs` always."""
    registry: dict = {}
    xdit.register(registry, "ours")
    q, k, v = (torch.randn(2, 3, 10, 8) for _ in range(3))
    for more, how in ((None, {}), ({}, {}), (dict(scale=0.2, attn_mask=None), dict(scale=0.2))):
        out, lse = registry["ours"](q, k, v, dropout_p=0.0, is_causal=True, attention_kwargs=more)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **how)
        torch.testing.assert_close(out, want)
        assert list(lse.shape) == [2, 3, 10]
    with pytest.raises(RingLAError, match=r"attention_kwargs.*attn_mask"):
        registry["ours"](q, k, v, dropout_p=0.0, is_causal=False, attention_kwargs=dict(attn_mask=torch.ones(10, 10)))
