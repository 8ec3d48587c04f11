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

from ring_la.indexers import lightning_index  # noqa: E402
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


KINDS = [("few heads", 9), ("many heads", 1), ("rising", 9), ("equal", 30), ("fp32", 9), ("8 bits", 9)]


@pytest.mark.parametrize(("kind", "topk"), KINDS)
def test_the_choice_is_that_of_a_stable_sort(kind, topk, monkeypatch):
    """Queries that stay and that are read again, documents, strips and chunks; lists that PyTorch sorts (30); scores
    that rise from key to key, and equal ones, of which the first are chosen."""
    from ring_la.indexers import best_kernel, index_kernel
    from ring_la.indexers.eight_bits import eight_bits
    from ring_la.indexers.lightning import index_scores

    tile = dict(BM=16, BN=16, SPAN=2, num_warps=4, num_stages=1)
    for name, value in dict(STAY=tile, PASS=tile, EXACT=tile, CHUNK=32, SLOTS=1 << 11).items():
        monkeypatch.setattr(index_kernel, name, value)
    monkeypatch.setattr(best_kernel, "BLOCK", 64)
    monkeypatch.setattr(best_kernel, "MOST", 16)
    monkeypatch.setattr(index_kernel, "FEW", 0 if kind == "many heads" else 1 << 16)
    rng, T = torch.Generator().manual_seed(0), 70
    q, k, w = (torch.randn(1, T, *s, generator=rng) for s in ((3, 20), (20,), (3,)))
    if kind == "rising":
        q, k, w = q.abs(), torch.arange(1.0, T + 1)[None, :, None].expand(1, T, 20), w.abs()
    elif kind == "equal":
        q, k, w = q.round(), k.round().clamp(-1, 1), w.sign()
    q, k = (q, k) if kind == "fp32" else (q.half(), k.half())
    cu = torch.tensor([0, T] if kind == "rising" else [0, 1, 20, T], dtype=torch.int32)
    got = lightning_index(q, k, w, topk, cu_seqlens=cu, backend="triton", fp8=kind == "8 bits")
    if kind == "8 bits":
        q, k, w, sizes = eight_bits(q, k, w)
        q, k = q.float(), k.float() * sizes[..., None]
    at = torch.arange(T)
    starts = cu[torch.searchsorted(cu, at, right=True) - 1]
    want, places = index_scores(q.double(), k.double(), w.double(), at, starts, 0).sort(
        dim=-1, descending=True, stable=True
    )
    want, places = want[..., :topk], places[..., :topk].masked_fill(torch.isneginf(want[..., :topk]), -1)
    torch.testing.assert_close(got.scores[:, :, 0].double(), want, rtol=2e-5, atol=2e-5)
    assert torch.equal(got.places[:, :, 0], places.int())


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
        lists, first = best_kernel.BestLists((B, T, heads), topk, s.device), 0
        for chunk in s.split(chunks, -1):
            lists.add(chunk, first)
            first += chunk.shape[-1]
        lists.write(places[:, 2:5], scores[:, 2:5])
        assert torch.equal(places[:, 2:5], order.int())
        assert torch.equal(scores[:, 2:5], want)


def lse_of(q, k, chosen, rows, scale: float) -> torch.Tensor:
    """Attention's, of each query and its choice, ``[B, H, T]``."""
    seen = (chosen >= rows.starts[:, None]) & (chosen <= rows.tokens[:, None])
    read = k.double()[torch.arange(len(q))[:, None, None], chosen.clamp(min=0).long(), 0]
    s = scale * torch.einsum("bthc,btsc->bhts", q.double(), read)
    return s.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(("H", "A", "heads", "given"), [(3, 20, 5, True), (3, 20, 5, False), (16, 300, 4, True)])
def test_the_loss_of_an_indexer_is_that_of_pytorch(H, A, heads, given):
    """L and its gradients beside fp64 of the same 16-bit numbers; attention's keys in one part and in two."""
    from ring_la.indexers import loss, loss_kernel
    from ring_la.indexers.chosen import Rows

    rng, T, S, D = torch.Generator().manual_seed(0), 24, 37, 12
    shapes = ((T, heads, D), (T, D), (T, heads), (T, H, A), (T, 1, A))
    q, k, w, aq, ak = (torch.randn(2, *shape, generator=rng).half() for shape in shapes)
    rows = Rows(T, None, torch.tensor([0, 9, 10, T]), torch.device("cpu"))
    chosen = torch.stack([torch.randperm(T, generator=rng) for _ in range(2 * T)]).view(2, T, T)
    chosen = torch.nn.functional.pad(chosen, (5, S - T - 5), value=-1).int()
    lse = lse_of(aq, ak, chosen, rows, A**-0.5) if given else None
    got = loss_kernel.with_gradients(q, k, w.float(), chosen, aq, ak, A**-0.5, rows, lse)
    wide = (x.double() for x in (q, k, w))
    want = loss.with_gradients(*wide, chosen, aq.double(), ak.double(), A**-0.5, rows)
    errors = [error(a.double(), b) for a, b in zip(got, want)]
    assert max(errors) < 1e-3, errors


def test_the_loss_is_one_kernel_for_few_tokens_and_many(monkeypatch):
    """Of 262,144 queries of 16 heads on latents one batch row has more numbers than 32 bits count."""
    from types import SimpleNamespace

    from ring_la.indexers import loss_kernel
    from ring_la.kernels.runtime.triton_version import class_of

    launched = []
    monkeypatch.setattr(loss_kernel, "launch", lambda kernel, grid, *x, **constants: launched.append((x, constants)))
    for T in (16384, 262144):

        def given(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        index = given(1, T, 4, 128), given(1, 4 * T, 128), given(1, T, 4), given(1, T, 2048, dtype=torch.int32)
        rows = SimpleNamespace(tokens=given(T, dtype=torch.int64), starts=given(T, dtype=torch.int64))
        loss_kernel.with_gradients(*index, given(1, T, 16, 576), given(1, 4 * T, 1, 576), 0.1, rows)
    few, many = ([(class_of(y, False), type(y)) for y in x if not isinstance(y, torch.Tensor)] for x, _ in launched)
    assert few == many
    assert launched[0][1] == launched[1][1]
