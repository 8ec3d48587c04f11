"""Dense softmax attention of the reference against PyTorch and closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from ring_la import reference
from ring_la.errors import ArgumentError

from .inputs import (
    HK,
    B,
    H,
    K,
    T,
    V,
    close,
    numbers,
    rand,
    scalars,
)


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def sdpa(q, k, v, mask=None, **keywords):
    return F.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, enable_gqa=True, **keywords)


def bias_of(lengths, bias):
    """`bias(position of the query, position of the key)` as a matrix, aligned at the end."""
    Tq, Tk = lengths
    return torch.tensor([[bias(i + Tk - Tq, j) for j in range(Tk)] for i in range(Tq)], dtype=torch.float64)


@pytest.mark.parametrize("lengths", [(7, 7), (3, 7)])
@pytest.mark.parametrize(
    ("keywords", "visible"),
    [
        ({"causal": False}, lambda i, j: True),
        ({}, lambda i, j: j <= i),
        ({"window": (2, 5)}, lambda i, j: i - 2 <= j <= i),
        ({"causal": False, "window": (2, 1)}, lambda i, j: i - 2 <= j <= i + 1),
        ({"causal": False, "window": (-1, 0)}, lambda i, j: j <= i),
        ({"causal": False, "window": (1, -1)}, lambda i, j: j >= i - 1),
    ],
)
def test_attention_masks_against_pytorch(lengths, keywords, visible):
    q, k, v = rand(B, lengths[0], H, K), rand(B, lengths[1], HK, K, seed=1), rand(B, lengths[1], HK, V)
    mask = bias_of(lengths, visible).bool()
    out = reference.attention(q, k, v, scale=0.7, **keywords)
    close(out.o.transpose(1, 2), sdpa(q, k, v, mask, scale=0.7))
    logits = 0.7 * torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(H // HK, dim=2))
    close(out.lse, torch.logsumexp(logits.masked_fill(~mask, -torch.inf), dim=-1))


def test_attention_softcap_alibi_and_sinks_in_closed_form():
    """One query, two keys: the cap first, then the slope times the distance, then the sink."""
    v = scalars(10, 20)
    scores = 4 * torch.tanh(numbers(6, 2) / 4) - 0.5 * numbers(1, 0)
    weights = scores.exp() / (scores.exp().sum() + numbers(1.5).exp())
    out = reference.attention(scalars(2), scalars(3, 1), v, softcap=4.0, alibi_slopes=numbers(0.5), sinks=numbers(1.5))
    close(out.o.flatten(), (weights * v.flatten()).sum()[None])
    close(out.lse.flatten(), torch.cat([scores, numbers(1.5)]).logsumexp(0)[None])


def test_alibi_slopes_per_head_and_per_batch_row():
    q, k, v, slopes = rand(B, T, H, K), rand(B, T, HK, K, seed=1), rand(B, T, HK, V), rand(B, H).abs()
    distance = bias_of((T, T), lambda i, j: -abs(i - j))
    out = reference.attention(q, k, v, causal=False, alibi_slopes=slopes)
    close(out.o.transpose(1, 2), sdpa(q, k, v, slopes[:, :, None, None] * distance))
    shared = reference.attention(q, k, v, causal=False, alibi_slopes=slopes[1])
    close(shared.o[1], out.o[1])
    assert not torch.allclose(shared.o[0], out.o[0])


def test_a_sink_is_a_key_with_no_value():
    """A first key that scores 0.3 against every query, through one more channel, and has value 0."""
    q, k, v = rand(1, T, 1, K), rand(1, T, 1, K, seed=1), rand(1, T, 1, V)
    sink_key = numbers(*[0.0] * K, 0.3, shape=(1, 1, 1, K + 1))
    wide_k = torch.cat([sink_key, F.pad(k, (0, 1))], dim=1)
    as_key = reference.attention(F.pad(q, (0, 1), value=1.0), wide_k, F.pad(v, (0, 0, 0, 0, 1, 0)), scale=1.0)
    out = reference.attention(q, k, v, scale=1.0, sinks=numbers(0.3))
    assert not torch.allclose(out.o, reference.attention(q, k, v, scale=1.0).o)
    close(out.o, as_key.o)
    close(out.lse, as_key.lse)


@pytest.mark.parametrize("causal", [True, False])
def test_joint_keys_are_concatenated(causal):
    q, k, v = rand(B, T, H, K), rand(B, T, HK, K, seed=1), rand(B, T, HK, V)
    jk, jv = rand(B, 4, HK, K, seed=2), rand(B, 4, HK, V, seed=2)
    joint = {"joint_k": jk, "joint_v": jv}
    front = reference.attention(q, k, v, causal=causal, joint="front", **joint)
    mask = torch.cat([torch.ones(T, 4), torch.ones(T, T).tril() if causal else torch.ones(T, T)], dim=1).bool()
    close(front.o.transpose(1, 2), sdpa(q, torch.cat([jk, k], 1), torch.cat([jv, v], 1), mask))
    if causal:
        with pytest.raises(ArgumentError, match="joint"):
            reference.attention(q, k, v, joint="rear", **joint)
        return
    rear = reference.attention(q, k, v, causal=False, joint="rear", window=(2, 2), **joint)
    wide = bias_of((T, T + 4), lambda i, j: abs(i - 4 - j) <= 2).bool()
    close(rear.o.transpose(1, 2), sdpa(q, torch.cat([k, jk], 1), torch.cat([v, jv], 1), wide))


def test_packed_attention_equals_separate_calls():
    q, k, v = rand(1, T, H, K), rand(1, T, HK, K, seed=1), rand(1, T, HK, V)
    joint = {"joint_k": rand(1, 2, HK, K), "joint_v": rand(1, 2, HK, V), "joint": "rear", "causal": False}
    for keywords in ({"window": (3, -1), "alibi_slopes": rand(H).abs()}, joint):
        bounds = [0, 0, 4, 5, 5, 13]
        packed = reference.attention(q, k, v, cu_seqlens=torch.tensor(bounds), **keywords)
        for start, end in pairwise(bounds):
            alone = reference.attention(q[:, start:end], k[:, start:end], v[:, start:end], **keywords)
            close(packed.o[:, start:end], alone.o)
            close(packed.lse[:, :, start:end], alone.lse)


def test_a_query_that_sees_no_key():
    q, k, v = (rand(1, n, 1, 2).requires_grad_() for n in (4, 2, 2))
    out = reference.attention(q, k, v)
    assert torch.equal(out.o[:, :2], torch.zeros(1, 2, 1, 2, dtype=torch.float64))
    assert out.lse[0, 0, :2].tolist() == [-torch.inf] * 2
    assert out.lse[0, 0, 2:].isfinite().all()
    (out.o.sum() + out.lse[:, :, 2:].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, :2].any()
    sink = reference.attention(q, k, v, sinks=torch.tensor([0.5]))
    assert sink.lse[0, 0, :2].tolist() == [0.5, 0.5]
    assert not sink.o[:, :2].any()
    none = reference.attention(q, k[:, :0], v[:, :0], causal=False)
    assert not none.o.any()
    assert torch.isneginf(none.lse).all()


def test_attention_gradients():
    q, k, v, jk, jv = (rand(1, n, h, 2, seed=n).requires_grad_() for n, h in ((3, 2), (3, 1), (3, 1), (2, 1), (2, 1)))
    slopes, sinks = rand(2).abs().requires_grad_(), rand(2, seed=1).requires_grad_()

    def function(q, k, v, jk, jv, slopes, sinks):
        joint = {"joint_k": jk, "joint_v": jv, "joint": "front"}
        return reference.attention(q, k, v, softcap=2.0, alibi_slopes=slopes, sinks=sinks, window=(3, -1), **joint)

    assert torch.autograd.gradcheck(function, (q, k, v, jk, jv, slopes, sinks))
