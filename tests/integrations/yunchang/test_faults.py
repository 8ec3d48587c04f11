"""One test for each known fault of the peers; what they do stands in a comment."""

from __future__ import annotations

import pytest
import torch

from ring_la.errors import RingLAError
from ring_la.integrations import ring_flash_attn, yunchang
from ring_la.integrations.yunchang.call import Masks, UpstreamCall, group_of
from ring_la.softmax import attention
from ring_la.softmax.tensors import Tensors
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.yunchang_cases import (
    H,
    T,
    compare,
    draw,
    leaves_of,
    places,
    truth,
)


def check_packed_arguments(rank: int) -> list[float]:
    at, tensors, errors = places("zigzag", rank, 2), draw(), []
    want = truth(tensors, causal=True)
    for dim_of, functions in (
        (2, (yunchang.zigzag_ring_flash_attn_kvpacked_func, yunchang.zigzag_ring_flash_attn_qkvpacked_func)),
        (
            2,
            (
                ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func,
                ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func,
            ),
        ),
    ):
        for function, n in zip(functions, (2, 3)):
            (q, k, v), do = leaves_of(tensors, at)
            stacked = torch.stack([q, k, v][3 - n :], dim_of)
            arguments = (q, stacked) if n == 2 else (stacked,)
            out = function(*arguments, causal=True, group=group(2))
            got = [out, None, *torch.autograd.grad((out * do).sum(), [q, k, v])]
            errors += [error(g, w[:, at]) for g, w in zip(got, want) if g is not None]
    return errors


def test_packed_entry_points_train(ranks):
    """yunchang's kvpacked and qkvpacked functions pass 13 arguments to a Function that takes and returns 14: calling
    them is a TypeError, and with a default it would be a wrong number of gradients."""
    assert all(e < 1e-9 for errors in ranks.run(2, check_packed_arguments) for e in errors)


class InXDiTsManner(yunchang.RingFlashAttnFunc):
    """A subclass that overrides forward only, with more inputs, and forgets ctx attributes (xDiT forgot softcap)."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
        attn_type,
        attn_processor,
        attn_layer,
        joint_tensor_key,
        joint_tensor_value,
        joint_strategy,
    ):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        call, x = UpstreamCall("contiguous", Masks(0.0, scale, causal, window_size), seed=0), Tensors(q, k, v)
        out, lse, _ = call.plan(x, group_of(group)).forward(x)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.causal, ctx.group = scale, causal, group
        return out


def check_subclass(rank: int) -> list[float]:
    at, tensors = places("contiguous", rank, 3), draw()
    leaves, do = leaves_of(tensors, at)
    out = InXDiTsManner.apply(
        *leaves, 0.0, None, True, (-1, -1), None, False, False, group(3), None, None, None, None, None, "none"
    )
    got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
    return [error(g, w[:, at]) for g, w in zip(got, truth(tensors, causal=True)) if g is not None]


def test_subclass_that_overrides_forward_only(ranks):
    """yunchang's backward reads ctx.softcap, which xDiT's forward did not set (AttributeError in training), and returns
    14 gradients for xDiT's 17 inputs (RuntimeError)."""
    assert all(e < 1e-9 for errors in ranks.run(3, check_subclass) for e in errors)


def check_wanted(rank: int) -> None:
    (q, k, v), _ = leaves_of(draw(), places("contiguous", rank, 2))
    joint = q[:, :3].detach()
    masks = (0.0, None, True, (-1, -1), None, False, False, group(2), None, None, None)
    with pytest.raises(RingLAError, match=r"InXDiTsManner: expected 3 tensors .* got 5\. Override backward"):
        InXDiTsManner.apply(q, k, v, *masks, joint, joint, "front").sum().backward()
    slopes = torch.ones(H, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RingLAError, match="no gradient of inputs after q, k and v, got of input 8"):
        yunchang.ring_flash_attn_func(q, k, v, alibi_slopes=slopes, group=group(2)).sum().backward()


def test_tensors_that_backward_does_not_know_are_an_error(ranks):
    """xDiT's joint keys: with yunchang's backward under its forward, q's gradient lacks their part and they get none,
    and training goes on."""
    ranks.run(2, check_wanted)


def check_dtype(rank: int, dtype: torch.dtype) -> list[tuple]:
    at, tensors, out_of = places("contiguous", rank, 4), draw(dtype=dtype), []
    leaves, do = leaves_of(tensors, at)
    out, lse, _ = yunchang.ring_flash_attn_func(*leaves, causal=True, return_attn_probs=True, group=group(4))
    grads = torch.autograd.grad((out * do).sum(), leaves)
    assert lse.dtype == torch.float32
    assert [g.dtype for g in grads] == [dtype] * 3
    out_of += compare([out, lse, *grads], truth(tensors, causal=True), at)
    return out_of


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_gradients_in_the_inputs_dtype_and_exact(ranks, dtype, limit):
    """yunchang returns dq as bfloat16 whatever came in; in fp32 its accumulator is an alias of the block's buffer
    (``.to(torch.float32)`` copies nothing), so blocks are added to themselves; its lse is zero on the math and cuDNN
    paths and rounded to bf16 on the flash path."""
    worst = max(e for errors in ranks.run(4, check_dtype, dtype) for e in errors)
    assert worst < limit


def check_dropout(rank: int) -> list[float]:
    import ring_la

    at, tensors = places("zigzag", rank, 2), draw()
    leaves, do = leaves_of(tensors, at)
    torch.manual_seed(5)
    seed = int(torch.randint(2**62, ()))
    torch.manual_seed(5)
    out = yunchang.zigzag_ring_flash_attn_func(*leaves, dropout_p=0.3, causal=True, group=group(2))
    got = [out, *torch.autograd.grad((out * do).sum(), leaves)]
    layout = ring_la.ContextParallel(group(2), scan="ring").layout(T)
    o = attention(*leaves, dropout_p=0.3, dropout_seed=seed, layout=layout, strategy="ring").o
    want = [o, *torch.autograd.grad((o * do).sum(), leaves)]
    return [error(g, w) for g, w in zip(got, want)]


def test_dropout_backward_has_the_forward_mask(ranks):
    """yunchang and ring-flash-attn drop each step's rng state: rng_state=None in backward is another mask."""
    assert all(e < 1e-12 for errors in ranks.run(2, check_dropout) for e in errors)


def check_foreign_dropout(rank: int) -> str:
    leaves, do = leaves_of(draw(), places("contiguous", rank, 2))
    out = InXDiTsManner.apply(
        *leaves, 0.0, None, True, (-1, -1), None, False, False, group(2), None, None, None, None, None, "none"
    )
    out.grad_fn.dropout_p = 0.1  # as a foreign forward with dropout would leave it
    with pytest.raises(RingLAError, match="dropout_p"):
        (out * do).sum().backward()
    return "refused"


def test_a_lost_mask_is_an_error(ranks):
    assert ranks.run(2, check_foreign_dropout) == ["refused"] * 2


def check_world_of_one(rank: int) -> tuple[int, list[float]]:
    tensors = draw()
    leaves, do = leaves_of(tensors, torch.arange(T))
    before = group_of(group(1)).bytes_sent
    out = yunchang.ring_flash_attn_func(*leaves, causal=True, group=group(1))
    got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
    errors = [error(g, w) for g, w in zip(got, truth(tensors, causal=True)) if g is not None]
    return group_of(group(1)).bytes_sent - before, errors


def test_no_message_at_world_size_one(ranks):
    """yunchang's backward sends dk and dv to itself at world size 1: NCCL hangs or raises."""
    ((sent, errors),) = ranks.run(1, check_world_of_one)
    assert sent == 0
    assert all(e < 1e-9 for e in errors)
