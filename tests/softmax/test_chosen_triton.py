"""The Triton kernels for chosen keys under Triton's interpreter, against the loop. GPUs: tests/gpu/test_chosen.py."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.attention_cases import error
from tests.support.chosen_cases import CU, FEATURES, draw, function_of, run, truth
from tests.support.interpreter import interpreted

interpreted()
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("GPUs have a check of their own", allow_module_level=True)

from ring_la.softmax.backends.triton import chosen_sorted, launch  # noqa: E402


@pytest.mark.parametrize("backend", ["triton", "triton_sorted"])
@pytest.mark.parametrize("feature", [f for f in FEATURES if f != "tokens"])
def test_kernels_are_the_loop(feature, backend, monkeypatch):
    monkeypatch.setattr(launch, "interpreted", True)
    monkeypatch.setattr(chosen_sorted, "SLOTS", 1)  # lists of 16 queries at once
    case, want = draw(feature, True), truth(feature, True)
    got = run(function_of(case), case, torch.float32, cu_seqlens=torch.tensor(CU), backend=backend)
    errors = {n: error(got[n], x) for n, x in want.items()}
    assert all(e < 2e-5 for e in errors.values()), errors


def test_index_scores_are_those_of_pytorch():
    from ring_la.indexers.lightning import index_scores
    from ring_la.indexers.scores_kernel import scores

    rng = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(*shape, generator=rng) for shape in ((2, 70, 3, 20), (2, 140, 20), (2, 70, 3)))
    tokens, starts = torch.arange(100, 170), torch.where(torch.arange(70) < 20, 0, 120)
    for first in (0, 90, 200):
        got, want = (f(q, k, w, tokens, starts, first) for f in (scores, index_scores))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("topk", [1, 5, 40])
@pytest.mark.parametrize("kind", ["random", "rising", "equal"])
def test_the_best_scores_are_those_of_a_sort(kind, topk, monkeypatch):
    """Equal scores by their places, whatever the chunks; rising ones fill the lists again and again."""
    from ring_la.indexers import best_kernel

    monkeypatch.setattr(best_kernel, "BLOCK", 64)
    B, T, heads, m = 2, 3, 2, 900
    s = torch.randn(B, T, heads, m, generator=torch.Generator().manual_seed(0))
    if kind == "rising":
        s = torch.arange(m).float().expand(B, T, heads, m) - 300.0
    elif kind == "equal":
        s = s.round()
    s = s.masked_fill(torch.rand(s.shape, generator=torch.Generator().manual_seed(1)) < 0.2, -torch.inf)
    s[0, 1, :, 3:] = -torch.inf
    want, order = s.sort(dim=-1, descending=True, stable=True)
    want, order = want[..., :topk], order[..., :topk].masked_fill(torch.isneginf(want[..., :topk]), -1)
    for chunks in ((900,), (130, 1, 700, 69)):
        places, scores = torch.zeros(B, 7, heads, topk, dtype=torch.int32), torch.zeros(B, 7, heads, topk)
        lists, first = best_kernel.BestLists(s, topk), 0
        for chunk in s.split(chunks, -1):
            lists.add(chunk, first)
            first += chunk.shape[-1]
        lists.write(places[:, 2:5], scores[:, 2:5])
        assert torch.equal(places[:, 2:5], order.int())
        assert torch.equal(scores[:, 2:5], want)


@pytest.mark.parametrize(("H", "A", "heads"), [(3, 20, 5), (16, 300, 4)])
def test_the_loss_of_an_indexer_is_that_of_pytorch(H, A, heads):
    """L and its gradients beside fp64 of the same 16-bit numbers; attention's keys in one part and in two."""
    from ring_la.indexers import lightning, loss_kernel
    from ring_la.indexers.chosen import Rows

    rng, T, S, D = torch.Generator().manual_seed(0), 24, 37, 12
    shapes = ((T, heads, D), (T, D), (T, heads), (T, H, A), (T, 1, A))
    q, k, w, aq, ak = (torch.randn(2, *shape, generator=rng).half() for shape in shapes)
    rows = Rows(T, None, torch.tensor([0, 9, 10, T]), torch.device("cpu"))
    chosen = torch.stack([torch.randperm(T, generator=rng) for _ in range(2 * T)]).view(2, T, T)
    chosen = torch.nn.functional.pad(chosen, (5, S - T - 5), value=-1).int()
    got = loss_kernel.with_gradients(q, k, w.float(), chosen, aq, ak, A**-0.5, rows)
    wide = (x.double() for x in (q, k, w))
    want = lightning._with_gradients(*wide, chosen, aq.double(), ak.double(), A**-0.5, rows)
    errors = [error(a.double(), b) for a, b in zip(got, want)]
    assert max(errors) < 1e-3, errors
