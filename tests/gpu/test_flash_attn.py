"""flash-attn's packages and our own kernels on the blocks of a ring, on one GPU:
`pytest -m gpu tests/gpu/test_flash_attn.py -n 12`.

Shards of four ranks meet as a ring has them meet, packed documents too; outputs, lse and every gradient from the global
lse, against the PyTorch kernel in fp64. What is not installed, or refuses, is skipped with its reason.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ring_la.errors import RingLAError
from ring_la.layout import Layout
from ring_la.softmax.backends import BACKENDS, Ask, QueryRows, choose
from ring_la.softmax.backends.triton import table
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Gradients, Partial, row_sums
from ring_la.softmax.scores import Scores
from tests.support.attention_cases import error

pytestmark = pytest.mark.gpu

KERNELS = (
    "cudnn",
    "flash",
    "flash_attn_2",
    "flash_attn_3",
    "fa3_fwd",
    "fa3_fwd_fp8",
    "flash_attn_4",
    "triton",
)
HEADS = ((64, (4, 4), KERNELS), (128, (8, 2), KERNELS), (256, (8, 2), ("cudnn", "flash", "triton")))
"""Channels, heads of queries and of keys, and the kernels that are asked for them."""
MASKS: dict[str, dict] = {
    "causal": dict(right=0),
    "full": dict(),
    "window": dict(left=200, right=0),
    "window both": dict(left=150, right=90),
    "softcap": dict(right=0, softcap=5.0),
}
T, RANKS, FLOOR = 1600, 4, 6e-3
FLOORS = {"fa3_fwd_fp8": 0.1}
"""Of kernels that round more."""
CU = (0, 7, 7, 600, 601, 830, 1600)
MEETINGS = (("contiguous", 1, 1), ("contiguous", 2, 0), ("zigzag", 1, 1), ("zigzag", 2, 0), ("zigzag", 0, 3))


def block(kernel, tensors, scores: Scores, pair: Pair) -> dict[str, torch.Tensor]:
    """o, lse and, of a kernel that has them, gradients."""
    q, k, v, do = tensors
    out = Partial(do.shape, q.dtype, q.device)
    kernel.forward(q, k, v, scores, pair, out)
    o, lse = out.result()
    found = dict(o=o, lse=lse)
    if kernel.forward_only:
        return found
    grads = Gradients.of(q, k, v)
    kernel.backward(QueryRows(q, o, do, lse, row_sums(do, o, None)), k, v, scores, pair, grads)
    return found | {name: total.result(q.dtype) for name, total in vars(grads).items()}


def drawn(D: int, heads: tuple[int, int], n: int, m: int) -> list[torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, n, heads[0], D), (1, m, heads[1], D), (1, m, heads[1], D), (1, n, heads[0], D))
    return [torch.randn(*s, generator=rng, device="cuda").bfloat16() for s in shapes]


def chosen(name: str, D: int, heads: tuple[int, int], scores: Scores, repeatable: bool = False):
    facts = dict(windowed=scores.reach.windowed, repeatable=repeatable, rows=T)
    ask = Ask(torch.device("cuda"), torch.bfloat16, *heads, D, D, scores.beyond, **facts)
    try:
        return choose(ask, name)
    except RingLAError as e:
        return pytest.skip(str(e))


@pytest.mark.parametrize("documents", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "D", "heads"),
    [pytest.param(name, D, h, id=f"{name}-D{D}-{h[0]}:{h[1]}") for D, h, some in HEADS for name in some],
)
def test_blocks_of_a_ring(name, D, heads, mask, documents):
    scores = Scores(D**-0.5, **MASKS[mask])
    kernel, beyond = chosen(name, D, heads, scores), {}
    for kind, rank, owner in MEETINGS:
        layout = Layout(T, kind, RANKS, cu_seqlens=CU if documents else None)
        rows, keys = (Tokens.of_ranks(layout, [r], torch.device("cuda")) for r in (rank, owner))
        pair, tensors = Pair(rows, keys, scores.reach), drawn(D, heads, len(rows), len(keys))
        got = block(kernel, tensors, scores, pair)
        with mock.patch.dict(table.SPANS_FORWARD, clear=True):  # the general kernels
            near = block(BACKENDS["triton"], tensors, scores, pair)
        want = block(BACKENDS["torch"], [t.double() for t in tensors], scores, pair)
        for result, value in got.items():
            if want[result].any():
                found, limit = (error(x[result], want[result]) for x in (got, near))
                if not found <= max(FLOORS.get(name, FLOOR), 2 * limit):
                    beyond[kind, rank, owner, result] = found, limit
            else:
                assert not value.any()
    assert not beyond


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("documents", [False, True], ids=["one", "packed"])
def test_repeatable_gradients(name, documents):
    D, heads, scores = 128, (8, 2), Scores(128**-0.5, right=0)
    kernel = chosen(name, D, heads, scores, repeatable=True)
    tokens = Tokens.whole(T, torch.device("cuda"), CU if documents else None)
    pair, tensors = Pair(tokens, tokens, scores.reach), drawn(D, heads, T, T)
    first, want = block(kernel, tensors, scores, pair), block(BACKENDS["triton"], tensors, scores, pair)
    for _ in range(3):
        again = block(kernel, tensors, scores, pair)
        assert [n for n in first if not torch.equal(first[n], again[n])] == []
    assert all(error(first[n], want[n]) < 2 * FLOOR for n in first)
