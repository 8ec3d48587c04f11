"""What cuDNN takes: the one tile its backward refuses ("s_q = s_kv = 1 is not supported"), found by packed documents of
one token, and heads of up to 256 channels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ring_la.errors import UnsupportedError
from ring_la.kernels import gpu
from ring_la.softmax.backends import BACKENDS, Ask, QueryRows, aten, choose, varlen
from ring_la.softmax.backends.aten import CuDNN
from ring_la.softmax.scores import Scores


@pytest.mark.parametrize("groups", [3, 1])
def test_one_query_one_key_of_a_longer_row(groups):
    """The tile's gradients from the global o and lse, against autograd through a row of three keys."""
    torch.manual_seed(0)
    q = torch.randn(2, 1, 3, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, groups, 8, requires_grad=True) for _ in range(2))
    do = torch.randn(2, 1, 3, 8)
    every_k, every_v = (x.repeat_interleave(3 // groups, 2) for x in (k, v))
    scores = 0.4 * torch.einsum("bihd,bjhd->bhij", q, every_k)
    o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), every_v)
    lse = scores.logsumexp(-1)
    dq, dk, dv = torch.autograd.grad((o * do).sum(), (q, k, v))
    rows = QueryRows(q, o, do, lse)
    parts = [CuDNN().tile_backward(rows, k[:, [j]], v[:, [j]], Scores(0.4), None) for j in range(3)]
    torch.testing.assert_close(sum(p[0] for p in parts), dq)
    torch.testing.assert_close(torch.cat([p[1] for p in parts], 1), dk)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], 1), dv)


def test_wide_heads(monkeypatch):
    """256 channels on Hopper with a PyTorch whose kernel passes our checks there: they were refused, then taken by name
    alone. Where cuDNN cannot, Triton's kernel is ahead of FlashAttention-2 at 128 and 256."""
    ask = Ask(torch.device("cuda"), torch.bfloat16, 8, 2, 256, 256, rows=4096)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(aten, "WIDE", True)
    monkeypatch.setattr(varlen, "has_triton", lambda: True)
    monkeypatch.setattr(BACKENDS["triton"], "unsupported", lambda ask: "")
    widths = {w: dataclasses.replace(ask, width=w, value_width=w) for w in (128, 192, 256, 252, 264)}
    assert [w for w, wide in widths.items() if not CuDNN().unsupported(wide)] == [128, 192, 256]
    assert [choose(widths[w], None).name for w in (128, 192, 256)] == ["cudnn", "flash", "cudnn"]
    packed = [dataclasses.replace(widths[w], packed=True) for w in (128, 192, 256)]
    assert [choose(p, None).name for p in packed] == ["triton", "flash", "triton"]
    windowed, few = dataclasses.replace(ask, windowed=True), dataclasses.replace(ask, rows=8)
    assert [choose(a, None).name for a in (windowed, few)] == ["triton", "flash"]
    for known, capability in ((False, (9, 0)), (True, (10, 0)), (True, (8, 0))):
        monkeypatch.setattr(aten, "WIDE", known)
        monkeypatch.setattr(gpu, "capability", lambda device, found=capability: found)
        with pytest.raises(UnsupportedError, match="up to 128"):
            choose(ask, "cudnn")
