"""yunchang's contract: our Functions and layers against the dense reference, each known fault of the peers, and interop
with the installed yunchang both ways.

Each rank of yunchang holds equally many tokens; `draw` makes the whole sequence, `part` what a rank holds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pathlib
import textwrap

import pytest
import torch
import torch.distributed as dist

from ring_la import reference
from ring_la.errors import RingLAError
from ring_la.integrations import ring_flash_attn, xdit, yunchang
from ring_la.integrations.yunchang.call import Call, group_of
from ring_la.integrations.yunchang.functions import flat_lse, pad_lse, remember, varlen_forward
from ring_la.softmax import attention, core
from ring_la.softmax.core import Tensors
from tests.distributed.pool import group
from tests.softmax.cases import error

B, T, H, D = 2, 48, 4, 8
DENSE = {
    "contiguous": (yunchang.RingFlashAttnFunc, yunchang.ring_flash_attn_func),
    "zigzag": (yunchang.ZigZagRingFlashAttnFunc, yunchang.zigzag_ring_flash_attn_func),
    "stripe": (yunchang.StripeFlashAttnFunc, yunchang.stripe_flash_attn_func),
}
DOCUMENTS = (0, 16, 24, 48)
"""Offsets of packed documents, each a multiple of 2 × 4 tokens."""


def draw(heads: tuple[int, int] = (H, H), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(B, T, heads[0], D), (B, T, heads[1], D), (B, T, heads[1], D), (B, T, heads[0], D)]
    return [torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes]


def places(kind: str, rank: int, P: int, length: int = T, start: int = 0) -> torch.Tensor:
    """Tokens of the sequence that a rank holds."""
    t = torch.arange(start, start + length)
    if kind == "zigzag":
        halves = t.chunk(2 * P)
        return torch.cat([halves[rank], halves[2 * P - 1 - rank]])
    return t[rank::P] if kind == "stripe" else t.chunk(P)[rank]


def packed_places(kind: str, rank: int, P: int) -> torch.Tensor:
    return torch.cat([places(kind, rank, P, b - a, a) for a, b in zip(DOCUMENTS, DOCUMENTS[1:])])


def truth(tensors: list[torch.Tensor], cu=None, **keywords) -> list[torch.Tensor]:
    """o, lse and the gradients of the whole."""
    *qkv, do = (t.double() for t in tensors)
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = reference.attention(*leaves, cu_seqlens=cu, **keywords)
    return [out.o.detach(), out.lse.detach(), *torch.autograd.grad((out.o * do).sum(), leaves)]


def leaves_of(tensors: list[torch.Tensor], at: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    *qkv, do = (t[:, at] for t in tensors)
    return [t.clone().requires_grad_() for t in qkv], do


def compare(got: list, want: list, at: torch.Tensor) -> list[float]:
    parts = [w[:, :, at] if i == 1 else w[:, at] for i, w in enumerate(want)]
    return [error(g, w) for g, w in zip(got, parts)]


MASKS = {
    "causal": (dict(causal=True), dict(causal=True)),
    "full": (dict(), dict(causal=False)),
    "window": (dict(causal=True, window_size=(7, 0)), dict(causal=True, window=(7, -1))),
    "window both": (dict(window_size=(7, 9)), dict(causal=False, window=(7, 9))),
    "softcap": (dict(causal=True, softcap=1.5, softmax_scale=0.3), dict(causal=True, softcap=1.5, scale=0.3)),
}


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


# -- the peers' known faults -------------------------------------------------------------------------------


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
        call = Call("contiguous", 0.0, scale, causal, window_size, 0.0, None, False, None, 0)
        plan = call.plan(Tensors(q, k, v), group_of(group))
        out, lse, _ = core.forward(plan, Tensors(q, k, v))
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


# -- layers ------------------------------------------------------------------------------------------------


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


def test_registry_entry():
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


# -- the installed yunchang --------------------------------------------------------------------------------


def exact_forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=True, **ignored):
    """A block kernel with upstream's signature: exact inside, results in the inputs' dtype, lse fp32."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * softmax_scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse[..., None]), v.double()).to(q.dtype), lse.float()


def exact_backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *ignored, **more):
    dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1]), -torch.inf)
    p = torch.exp(s - lse[..., None])
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - (dout * out).sum(-1).transpose(1, 2)[..., None])
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k) * softmax_scale)
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q) * softmax_scale)
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dout))


def upstream(kind: str):
    """(their module, their Function), on exact kernels."""
    names = {"contiguous": "ring_flash_attn", "zigzag": "zigzag_ring_flash_attn", "stripe": "stripe_flash_attn"}
    module = importlib.import_module(f"yunchang.ring.{names[kind]}")
    module.select_flash_attn_impl = lambda attn_type, stage, **more: (
        exact_forward if stage == "fwd-only" else exact_backward
    )
    return module, getattr(module, DENSE[kind][0].__name__)


def check_interop(rank: int, kind: str) -> list[float]:
    _, theirs = upstream(kind)
    from yunchang.kernels import AttnType

    ours, at, tensors, errors = DENSE[kind][0], places(kind, rank, 4), draw(dtype=torch.float16), []
    extra = (None,) if kind == "contiguous" else ()  # their zigzag and stripe take 13 inputs
    for forward, backward in ((ours, theirs), (theirs, ours)):
        mixed = type("Mixed", (torch.autograd.Function,), dict(
            forward=staticmethod(forward.forward), backward=staticmethod(backward.backward)
        ))  # fmt: skip
        leaves, do = leaves_of(tensors, at)
        out = mixed.apply(*leaves, 0.0, None, True, (-1, -1), 0.0, None, False, False, group(4), AttnType.FA, *extra)
        got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
        limits = [2e-3, 0, 1e-2, 2e-3, 2e-3]  # their basic ring returns dq in bf16
        for g, w, limit in zip(got, truth(tensors, causal=True), limits):
            if g is not None:
                errors.append(error(g, w[:, at]) / limit)
    return errors


@pytest.mark.parametrize("kind", DENSE)
def test_forward_and_backward_mix_with_yunchang(ranks, kind):
    pytest.importorskip("yunchang")
    assert all(e < 1 for errors in ranks.run(4, check_interop, kind) for e in errors)


def exact_varlen_forward(
    q, k, v, cu_q, cu_k, longest_q, longest_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """flash-attn 2.6's varlen block, whose lse is padded."""
    spans = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    parts = [
        exact_forward(q[None, a:b], k[None, c:d], v[None, c:d], 0.0, softmax_scale, causal) for a, b, c, d in spans
    ]
    lse = torch.cat([lse[0] for _, lse in parts], 1)
    padded = pad_lse(lse, cu_q.tolist(), longest_q)
    return torch.cat([o[0] for o, _ in parts]), None, None, None, None, padded, None, None


def exact_varlen_backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, longest_q, longest_k, dropout_p, softmax_scale, causal, *ignored,
    **more,
):  # fmt: skip
    spans = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    for n, (a, b, c, d) in enumerate(spans):
        into = dq[None, a:b], dk[None, c:d], dv[None, c:d]
        rows = (dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b], lse[None, n, :, : b - a])
        exact_backward(*rows, *into, 0.0, softmax_scale, causal)


def check_varlen_interop(rank: int, name: str, documents: tuple[int, ...]) -> list[float]:
    from yunchang.ring import utils

    module, ours = importlib.import_module(f"yunchang.ring.{name}"), VARLEN[name]
    module.HAS_FLASH_ATTN = True
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = exact_varlen_forward, exact_varlen_backward
    module.flatten_varlen_lse, module.unflatten_varlen_lse = utils.flatten_varlen_lse, utils.unflatten_varlen_lse
    rng = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, T, H, D, generator=rng, dtype=torch.float64).half() for _ in range(4)]
    at = torch.cat([places(ours.kind, rank, 4, b - a, a) for a, b in zip(documents, documents[1:])])
    cu, errors = torch.tensor(documents, dtype=torch.int32) // 4, []
    theirs = getattr(module, ours.__name__)
    for forward, backward in ((ours, theirs), (theirs, ours)):
        mixed = type("Mixed", (torch.autograd.Function,), dict(
            forward=staticmethod(forward.forward), backward=staticmethod(backward.backward)
        ))  # fmt: skip
        *leaves, do = (t[0, at].clone().requires_grad_() for t in whole)
        longest = int(cu.diff().max())
        out = mixed.apply(*leaves, cu, longest, 0.0, None, True, (-1, -1), 0.0, None, False, False, group(4))
        got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
        limits = [2e-3, 0, 1e-2, 2e-3, 2e-3]  # their varlen ring returns dq in bf16
        for g, w, limit in zip(got, truth(whole, documents, causal=True), limits):
            if g is not None:
                errors.append(error(g[None], w[:, at]) / limit)
    return errors


@pytest.mark.parametrize("documents", [DOCUMENTS, (0, T)])
@pytest.mark.parametrize("name", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_varlen_forward_and_backward_mix_with_yunchang(ranks, name, documents):
    pytest.importorskip("yunchang")
    assert all(e < 1 for errors in ranks.run(4, check_varlen_interop, name, documents) for e in errors)


def attributes(function, target: str, store: bool) -> set[str]:
    """Attributes of `target` that a function's source stores or reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    kind = ast.Store if store else ast.Load
    return {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id == target
        and isinstance(n.ctx, kind)
    }


VARLEN = {
    "ring_flash_attn_varlen": yunchang.RingFlashAttnVarlenFunc,
    "zigzag_ring_flash_attn_varlen": yunchang.ZigZagRingFlashAttnVarlenFunc,
}


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("ring_flash_attn", yunchang.RingFlashAttnFunc),
        ("zigzag_ring_flash_attn", yunchang.ZigZagRingFlashAttnFunc),
        ("stripe_flash_attn", yunchang.StripeFlashAttnFunc),
        *VARLEN.items(),
    ],
)
def test_every_attribute_upstream_reads_is_written(module, ours):
    pytest.importorskip("yunchang")
    theirs = getattr(importlib.import_module(f"yunchang.ring.{module}"), ours.__name__)
    written = attributes(remember, "ctx", True) | {"saved_tensors", "needs_input_grad"}
    if module in VARLEN:
        written |= attributes(varlen_forward, "ctx", True) | {"half_index0", "half_index1"}
    read = attributes(theirs.backward, "ctx", False)
    assert read, "nothing found: the test is blind"
    assert read <= written
    inputs = [p for p in inspect.signature(theirs.forward).parameters if p != "ctx"]
    own = [p for p in inspect.signature(ours.forward).parameters if p != "ctx"]
    assert own[: len(inputs)] == inputs


def test_signatures_are_upstreams():
    pytest.importorskip("yunchang")
    theirs = importlib.import_module("yunchang.ring")
    for name in (n for n in dir(theirs) if n.endswith("_func") and hasattr(yunchang, n)):
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(yunchang, name)).parameters)[: len(wanted)] == wanted, name


def test_signatures_are_ring_flash_attns():
    """Read from its source: the package cannot be imported without flash-attn."""
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None:
        pytest.skip("needs ring-flash-attn")
    files = pathlib.Path(found.submodule_search_locations[0]).glob("*_attn*.py")
    functions = [n for f in files for n in ast.parse(f.read_text()).body if isinstance(n, ast.FunctionDef)]
    public = {f.name: [a.arg for a in f.args.args] for f in functions if f.name.endswith("_func")}
    assert len(public) >= 18, "too few found: the test is blind"
    for name, wanted in public.items():
        assert list(inspect.signature(getattr(ring_flash_attn, name)).parameters)[: len(wanted)] == wanted, name


def check_their_layers(rank: int) -> list[float]:
    """Their layers over our functions, exchange of heads and split theirs."""
    import yunchang as theirs

    theirs.set_seq_parallel_pg(2, 2, rank, 4)
    uninstall, errors = yunchang.install(), []
    for impl in ("basic", "zigzag", "strip"):
        cut = theirs.EXTRACT_FUNC_DICT[impl]
        *leaves, do = (cut(t, rank, 4, rd=2, ud=2).clone().requires_grad_() for t in draw())
        want = [cut(t, rank, 4, rd=2, ud=2) for i, t in enumerate(truth(draw(), causal=True)) if i != 1]
        out = theirs.LongContextAttention(ring_impl_type=impl)(*leaves, causal=True)
        packed = theirs.LongContextAttentionQKVPacked(ring_impl_type=impl)(torch.stack(leaves, 2), causal=True)
        got = [out, *torch.autograd.grad((out * do).sum(), leaves), packed]
        errors += [error(g, w) for g, w in zip(got, [*want, want[0]])]
    uninstall()
    return errors


def test_their_layers_over_our_functions(ranks):
    pytest.importorskip("yunchang")
    assert all(e < 1e-9 for errors in ranks.run(4, check_their_layers) for e in errors)


def test_install_and_uninstall():
    pytest.importorskip("yunchang")
    from yunchang.hybrid import utils

    before = dict(utils.RING_IMPL_DICT)
    uninstall = yunchang.install()
    assert utils.RING_IMPL_DICT["zigzag"] is yunchang.zigzag_ring_flash_attn_func
    uninstall()
    assert before == utils.RING_IMPL_DICT


# -- wrong arguments ---------------------------------------------------------------------------------------


def wrong_calls(rank: int) -> dict[str, object]:
    """Calls that are refused, by the argument that the error names."""

    def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    q, packed, cu = t(1, 8, 4, 8), t(8, 4, 8), torch.tensor([0, 2, 8], dtype=torch.int32)
    layer, us = xdit.LongContextAttention(), dict(group=group(2))
    names = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")
    few = dict(zip(names, (t(1, 3, 4, 8), t(1, 3, 2, 8), t(1, 3, 2, 8))))
    calls = {
        "joint_k": lambda: layer(None, q, q, q, **few, joint_strategy="front"),
        "joint_tensor_query": lambda: layer(
            None, q, q, q, **dict.fromkeys(names, t(1, 3, 2, 8)), joint_strategy="rear"
        ),
        "value": lambda: yunchang.zigzag_extract_local(t(1, 6, 4), rank, 2, 2, 1),
        "rd, ud": lambda: yunchang.stripe_extract_local(q, rank, 2, 1, 2),
        "rank": lambda: ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu, True, 2, 2),
        "rank 0": lambda: yunchang.basic_extract_local(q, 2, 2),
        "cu_seqlens": lambda: ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu[:0], True, 0, 2),
        "joint_strategy": lambda: layer(
            None, q, q, q, **dict.fromkeys(names, t(1, 3, 4, 8)), joint_strategy="rear", window_size=5
        ),
        "cu_seqlens_q": lambda: ring_flash_attn.llama3_flash_attn_varlen_func(
            packed, packed, packed, cu[:2], cu, 6, 6, 1, slice(0, 8), **us
        ),
    }
    for n, part in enumerate((slice(None), slice(-8, 0), slice(9, 17), slice(0, 8, 2))):
        calls[f"local_k_slice {n}"] = lambda part=part: ring_flash_attn.llama3_flash_attn_varlen_func(
            packed, packed, packed, cu, cu, 6, 6, 1, part, **us
        )
    for n, module in enumerate((yunchang, ring_flash_attn)):
        dense = module.zigzag_ring_flash_attn_func
        varlen = module.zigzag_ring_flash_attn_varlen_func
        given = {
            "q": lambda f=dense: f(q, t(1, 8, 3, 8), t(1, 8, 3, 8), **us),
            "k": lambda f=dense: f(q, q.double(), q, **us),
            "v": lambda f=dense: f(q, q, t(1, 6, 4, 8), **us),
            "group": lambda f=dense: f(q, q, q, group="context"),
            "window_size": lambda f=dense: f(q, q, q, window_size=5, **us),
            "softmax_scale": lambda f=dense: f(q, q, q, softmax_scale=float("nan"), **us),
            "alibi_slopes": lambda f=dense: f(q, q, q, alibi_slopes=t(3), **us),
            "kv": lambda f=module.zigzag_ring_flash_attn_kvpacked_func: f(q, t(1, 8, 3, 4, 8)),
            "qkv": lambda f=module.zigzag_ring_flash_attn_varlen_qkvpacked_func: f(t(8, 2, 4, 8), cu, 6),
            "cu_seqlens": lambda f=varlen: f(packed, packed, packed, cu[:2], 6, **us),
            "max_seqlen": lambda f=varlen: f(packed, packed, packed, cu, 3, **us),
            "max_seqlen ": lambda f=varlen: f(packed, packed, packed, cu, None, **us),
            "the arguments": lambda f=dense: f(*[t(1, 8 + 2 * rank, 4, 8)] * 3, **us),
        }
        calls |= {f"{name} {n}": call for name, call in given.items()}
    return calls


def check_wrong(rank: int) -> list[str]:
    bad = []
    alone = dist.new_group([rank], use_local_synchronization=True)
    yunchang.PROCESS_GROUP.RING_PG, yunchang.PROCESS_GROUP.ULYSSES_PG = group(2), alone
    for name, call in wrong_calls(rank).items():
        try:
            call()
            bad.append(f"{name}: accepted")
        except RingLAError as e:
            bad += [] if name.rstrip(" 0123") in str(e) else [f"{name}: {e}"]
    return bad


def test_wrong_arguments_are_named(ranks):
    """Upstream takes heads that do not divide, batches that broadcast and offsets that end early, and computes."""
    assert ranks.run(2, check_wrong) == [[], []]


def check_bounded(rank: int) -> int:
    before, yunchang.call.COMPARED = yunchang.call.COMPARED, 3
    try:
        for n in range(5):
            x, cu = torch.ones(8, 2, 4), torch.tensor([0, n, 8], dtype=torch.int32)
            yunchang.ring_flash_attn_varlen_func(x, x, x, cu, 8, group=group(2))
        return len(yunchang.call._compared[group_of(group(2))])
    finally:
        yunchang.call.COMPARED = before


def test_few_compared_calls_are_remembered(ranks):
    """Every step of packed training brings other offsets."""
    assert ranks.run(2, check_bounded) == [3, 3]
