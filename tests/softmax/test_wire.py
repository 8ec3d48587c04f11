"""Keys and values that travel in FP8: attention of the rounded ones, however they travel, in fewer bytes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la.errors import RingLAError
from ring_la.softmax import attention
from ring_la.softmax.wire import COMM_DTYPES, pack, unpack
from tests.support.attention_cases import error
from tests.support.pool import group

T, BOUNDS = 41, {torch.float8_e4m3fn: 0.04, torch.float8_e5m2: 0.08}
"""Tokens; errors beside the exact result, of three and two bits of mantissa."""


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, h, d, dtype=torch.float64) for h, d in ((4, 16), (2, 16), (2, 8)))
    return [q, k * torch.logspace(-2, 0, T).double()[:, None, None], v]  # a scale a token


def check(rank: int, dtype: torch.dtype) -> list[str]:
    (q, k, v), bad = inputs(), []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    want = attention(q, *(unpack(pack(x, dtype), dtype, x.dtype) for x in (k, v)), causal=False).o
    whole = attention(q, k, v, causal=False).o
    for strategy in ("ring", "all_gather", "ulysses", "usp"):
        cp = ring_la.ContextParallel(mesh if strategy == "usp" else group(4), scan="ring", attention=strategy)
        layout, sent = cp.layout(T, "striped"), []
        part = [layout.shard(x) for x in (q, k, v)]
        for given in (None, dtype):
            before = cp.comm.bytes_sent
            o = attention(*part, causal=False, layout=layout, kv_comm_dtype=given).o
            sent.append(cp.comm.bytes_sent - before)
        e, rounded = error(layout.gather(o), want), error(layout.gather(o), whole)
        bad += [] if e < 1e-12 and 1e-3 < rounded < BOUNDS[dtype] else [f"{strategy} {e:.1e} {rounded:.1e}"]
        bad += [] if strategy != "ring" or 8 * sent[1] == sent[0] * (24 + 8) / 24 else [f"{strategy} sent {sent}"]
    cases = {
        "gradients are wanted": dict(layout=layout, q=part[0].requires_grad_()),
        "None without a layout": dict(k=k, v=v),
        "torch.float8_e4m3fn": dict(layout=layout, kv_comm_dtype=torch.int8),
    }
    for message, case in cases.items():
        given = dict(q=q if "k" in case else part[0].detach(), k=part[1], v=part[2], causal=False)
        try:
            attention(**given | dict(kv_comm_dtype=dtype) | case)
            bad.append(f"{message}: accepted")
        except RingLAError as e:
            bad += [] if message in str(e) else [str(e)]
    return bad


def latents(rank: int) -> list[str]:
    """Latents and rotary parts that travel so, in both forms, beside those of one process that are rounded so."""
    torch.manual_seed(0)
    q, c, r, up = (torch.randn(s).double() for s in ((1, T, 2, 12), (1, T, 16), (1, T, 4), (2, 2, 8, 16)))
    dtype, bad, layout = torch.float8_e4m3fn, [], ring_la.ContextParallel(group(2), scan="ring").layout(T)
    low = [unpack(pack(x, dtype), dtype, x.dtype) for x in (c, r)]
    for form in ("expanded", "absorbed"):
        want = ring_la.mla(q, *low, *up).o
        given = [layout.shard(x) for x in (q, c, r)]
        got = ring_la.mla(*given, *up, layout=layout, form=form, kv_comm_dtype=dtype).o
        e = error(layout.gather(got), want)
        bad += [] if e < 1e-12 else [f"{form} {e:.1e}"]
    empty = torch.zeros(1, T, 0).double()
    ring_la.mla(*(layout.shard(x) for x in (q[..., :8], c, empty)), *up, layout=layout, kv_comm_dtype=dtype)
    try:
        places = layout.shard(torch.zeros(1, T, 1, 1, dtype=torch.int64))
        ring_la.mla(*given, *up, chosen=places, layout=layout, kv_comm_dtype=dtype)
        bad.append("a choice: accepted")
    except RingLAError as e:
        bad += [] if "kv_comm_dtype" in str(e) else [str(e)]
    return bad


def test_keys_in_fp8_on_the_wire(ranks):
    assert ranks.run(2, latents) == [[]] * 2
    for dtype in COMM_DTYPES:
        assert ranks.run(4, check, dtype) == [[]] * 4
