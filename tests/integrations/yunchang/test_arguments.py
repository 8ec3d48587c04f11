"""Wrong arguments of the entry points are named, on every rank."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ring_la.errors import RingLAError
from ring_la.integrations import ring_flash_attn, xdit, yunchang
from ring_la.integrations.yunchang.call import group_of
from tests.support.pool import group


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
    llama3 = partial(ring_flash_attn.llama3_flash_attn_varlen_func, packed, packed, packed, cu, cu)
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    calls |= {
        "max_seqlen_q": lambda: llama3("6", 6, 1, slice(0, 8), **us),
        "max_seqlen_k": lambda: llama3(6, 5, 1, slice(0, 8), **us),
        "causal 2": lambda: prepare(cu, "no", 0, 2),
        "rank 1": lambda: prepare(cu, True, 0.5, 2),
        "world_size": lambda: prepare(cu, True, 0, "2"),
        "sp_ring_degree": lambda: yunchang.set_seq_parallel_pg(1, 1.0, rank, 2),
        "ring_impl_type": lambda: yunchang.LongContextAttention(ring_impl_type=["zigzag"]),
        "attn_type": lambda: yunchang.ring_flash_attn_func(q, q, q, attn_type=["fa"], **us),
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
            "causal": lambda f=dense: f(q, q, q, causal="no", **us),
            "deterministic": lambda f=dense: f(q, q, q, deterministic="no", **us),
            "return_attn_probs": lambda f=dense: f(q, q, q, return_attn_probs="no", **us),
            "group": lambda f=dense: f(q, q, q, group="context"),
            "window_size": lambda f=dense: f(q, q, q, window_size=5, **us),
            "softmax_scale": lambda f=dense: f(q, q, q, softmax_scale=float("nan"), **us),
            "alibi_slopes": lambda f=dense: f(q, q, q, alibi_slopes=t(3), **us),
            "kv": lambda f=module.zigzag_ring_flash_attn_kvpacked_func: f(q, t(1, 8, 3, 4, 8), **us),
            "qkv": lambda f=module.zigzag_ring_flash_attn_varlen_qkvpacked_func: f(t(8, 2, 4, 8), cu, 6, **us),
            "cu_seqlens": lambda f=varlen: f(packed, packed, packed, cu[:2], 6, **us),
            "max_seqlen": lambda f=varlen: f(packed, packed, packed, cu, 3, **us),
            "max_seqlen ": lambda f=varlen: f(packed, packed, packed, cu, None, **us),
            "the arguments": lambda f=dense: f(*[t(1, 8 + 2 * rank, 4, 8)] * 3, **us),
        }
        calls |= {f"{name} {n}": call for name, call in given.items()}
    return calls


def shapes(tokens: int) -> str:
    return ", ".join(f"{n}=shape [1, {tokens}, 4, 8], dtype torch.float32, requires_grad False" for n in "qkv")


def check_wrong(rank: int) -> list[str]:
    bad = []
    alone = dist.new_group([rank], use_local_synchronization=True)
    yunchang.PROCESS_GROUP.RING_PG, yunchang.PROCESS_GROUP.ULYSSES_PG = group(2), alone
    for name, call in wrong_calls(rank).items():
        try:
            call()
            bad.append(f"{name}: accepted")
        except RingLAError as e:
            said = name.rstrip(" 0123")
            if said == "the arguments":  # ranks that differ: what in, by name
                said = "the arguments of attention:" + "".join(f"\n  rank {r}: {shapes(8 + 2 * r)}" for r in range(2))
            bad += [] if said in str(e) else [f"{name}: {e}"]
    return bad


def test_wrong_arguments_are_named(ranks):
    """Upstream takes heads that do not divide, batches that broadcast and offsets that end early, and computes."""
    assert ranks.run(2, check_wrong) == [[], []]


def check_one_rank(rank: int) -> list[str]:
    """Calls that rank 1 alone gives wrong: what each rank is told."""
    q, us = torch.ones(1, 8, 4, 8), dict(group=group(2))
    alone = dist.new_group([rank], use_local_synchronization=True)
    yunchang.PROCESS_GROUP.RING_PG, yunchang.PROCESS_GROUP.ULYSSES_PG = group(2), alone
    layer, whole = xdit.LongContextAttention(), yunchang.LongContextAttentionQKVPacked()
    names = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")
    text, off = dict.fromkeys(names, q[:, :3]), torch.ones(1, 8, 4, 8, device="meta")
    calls = {
        "kv": lambda wrong: yunchang.ring_flash_attn_kvpacked_func(
            q, None if wrong else q[:, :, None].repeat(1, 1, 2, 1, 1), **us
        ),
        "qkv": lambda wrong: whole(q if wrong else q[:, :, None].repeat(1, 1, 3, 1, 1)),
        "q": lambda wrong: layer(None, None if wrong else q, q, q, **text, joint_strategy="front"),
        "device": lambda wrong: yunchang.ring_flash_attn_func(*[off if wrong else q] * 3, **us),
    }
    bad = []
    for name, call in calls.items():
        try:
            call(rank == 1)
            bad.append(f"{name}: accepted")
        except RingLAError as e:
            bad += [] if f"{name}: expected" in str(e) or f"{name}=" in str(e) else [f"{name}: {e}"]
    return bad


def test_what_one_rank_alone_gives_wrong_is_an_error_on_both(ranks):
    assert ranks.run(2, check_one_rank, timeout=30) == [[], []]


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
