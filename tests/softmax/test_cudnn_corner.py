"""The one tile cuDNN's backward refuses ("s_q = s_kv = 1 is not supported"): found by packed documents of one token."""

from __future__ import annotations

import pytest
import torch

from ring_la.softmax.backends import QueryRows
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
