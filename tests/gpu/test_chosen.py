"""Kernels of latents, chosen keys and index scores on one GPU, against the PyTorch forms in fp64.

pytest -m gpu tests/gpu/test_chosen.py -n 6
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.indexers import lightning_index, lightning_loss
from tests.support.attention_cases import error

pytestmark = pytest.mark.gpu

T, CU = 700, (0, 100, 101, 700)
L, R, N, V = 512, 64, 128, 128
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 5e-5}
"""About twice what rounding weights and gradients of scores costs dense attention."""


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, device="cuda", dtype=torch.float64)


def run(function, x: list[Tensor], do: Tensor, **how) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in x]
    how = {"cu_seqlens": torch.tensor(CU, device="cuda", dtype=torch.int32)} | how
    out = function(*leaves, **how)
    return [out.o.detach(), *torch.autograd.grad(out.o, leaves, do.to(out.o.dtype))]


def latents(rng: torch.Generator, H: int) -> list[Tensor]:
    weights = [normal(rng, H, width, L) / L**0.5 for width in (N, V)]
    return [normal(rng, 1, T, H, N + R), normal(rng, 1, T, L), normal(rng, 1, T, R), *weights]


def compare(function, x: list[Tensor], do: Tensor, dtype: torch.dtype, want: dict, got: dict) -> None:
    x = [t.to(dtype) for t in x]
    truth = run(function, [t.double() for t in x], do, **want)
    errors = [error(a, b) for a, b in zip(run(function, x, do, **got), truth)]
    assert max(errors) < LIMITS[dtype], errors


SHAPES = [(16, None, 1), (128, None, 1), (8, 64, 1), (8, 64, 32), (32, 128, 64), (2, 128, 1), (8, 96, 16)]


@pytest.mark.parametrize("backend", ["triton", "triton_sorted"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("H", "D", "block"), SHAPES)
def test_chosen_keys(H, D, block, dtype, backend):
    """D None: latents, absorbed."""
    rng = torch.Generator("cuda").manual_seed(0)
    if D is None:
        function, x, do, heads = ring_la.mla, latents(rng, H), normal(rng, 1, T, H, V), 1
    else:
        x, do, heads = [normal(rng, 1, T, h, D) for h in (H, 2, 2)], normal(rng, 1, T, H, D), 2
        function = ring_la.sparse_attention
    starts = torch.arange(0, T, block, device="cuda")
    noise = torch.rand(1, T, heads, len(starts), generator=rng, device="cuda")
    chosen = starts[noise.topk(96 if block == 1 else 5).indices].int()
    how = dict(chosen=chosen, block=block)
    compare(function, x, do, dtype, dict(how, backend="torch"), dict(how, backend=backend))


BLOCKS = [  # query heads, key heads, width, keys of a block, dtypes beside bf16
    (32, 2, 128, 64, [torch.float16, torch.float32]),
    (32, 2, 64, 64, [torch.float16, torch.float32]),
    (16, 2, 128, 32, [torch.float16]),
    (8, 2, 64, 16, [torch.float16]),
    (8, 4, 128, 128, [torch.float16]),
    (4, 4, 128, 64, []),
    (4, 4, 64, 128, []),
    (6, 1, 128, 64, []),
    (64, 1, 128, 64, []),
    (16, 1, 128, 16, []),
    (8, 1, 96, 48, []),
]


@pytest.mark.parametrize(
    ("H", "Hk", "D", "block", "dtype"),
    [(*shape, dtype) for *shape, more in BLOCKS for dtype in (torch.bfloat16, *more)],
)
def test_chosen_blocks(H, Hk, D, block, dtype):
    """Packed and as one document. Gradients are the same bits in a second run, and nearly so of queries in parts."""
    from ring_la.softmax.backends.triton import chosen_blocks

    rng = torch.Generator("cuda").manual_seed(6)
    x, do = [normal(rng, 1, T, h, D) for h in (H, Hk, Hk)], normal(rng, 1, T, H, D)
    starts = torch.arange(0, T, block, device="cuda")
    noise = torch.rand(1, T, Hk, len(starts), generator=rng, device="cuda")
    how = dict(chosen=starts[noise.topk(5).indices].int(), block=block)
    named = dict(how, backend="triton_blocks")
    for where in ({}, dict(cu_seqlens=None)):
        compare(ring_la.sparse_attention, x, do, dtype, how | where | dict(backend="torch"), named | where)
    x = [t.to(dtype) for t in x]
    once, again = (run(ring_la.sparse_attention, x, do, **named) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again))
    with patch.object(chosen_blocks, "SLOTS", 1):
        parts = run(ring_la.sparse_attention, x, do, **named)
    assert all(error(a, b) < LIMITS[dtype] for a, b in zip(parts, once))


@pytest.mark.parametrize(("form", "backend"), [("expanded", None), ("absorbed", None), ("expanded", "cudnn")])
def test_latents(form, backend):
    """cuDNN knows no packed documents on a GPU."""
    where = {} if backend is None else {"cu_seqlens": None}
    rng = torch.Generator("cuda").manual_seed(1)
    x, do = latents(rng, 4), normal(rng, 1, T, 4, V)
    x = [t.bfloat16() for t in x]
    truth = run(reference.mla, [t.double() for t in x], do, **where)
    got = run(ring_la.mla, x, do, form=form, backend=backend, **where)
    errors = [error(a, b) for a, b in zip(got, truth)]
    assert max(errors) < 1.5e-2, errors


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [4, 6, 64])
@pytest.mark.parametrize("dtype", LIMITS)
def test_the_choice(dtype, heads, fp8):
    """Scores beside fp64's; queries that stay in shared memory (4 heads) and that pass, and products of 8 bits."""
    rng = torch.Generator("cuda").manual_seed(2)
    q, k = (normal(rng, 2, T, *shape).to(dtype) for shape in ((heads, 128), (128,)))
    w = normal(rng, 2, T, heads).abs().float()
    got = lightning_index(q, k, w, 64, backend="triton", fp8=fp8)
    if fp8:
        want = lightning_index(q, k, w, 64, backend="torch", fp8=True)
    else:
        want = lightning_index(q.double(), k.double(), w.double(), 64, backend="torch")
    there = ~torch.isneginf(want.scores)
    assert torch.equal(torch.isneginf(got.scores), ~there)
    assert error(got.scores[there], want.scores[there]) < (1e-3 if fp8 else LIMITS[dtype])


@pytest.mark.parametrize("kind", ["random", "rising", "equal"])
def test_the_choice_of_many_keys(kind):
    """40,000 keys in chunks and 2,048 of them, beside a stable sort of the same scores."""
    rng, n = torch.Generator("cuda").manual_seed(5), 40_000
    q, k = torch.zeros(1, n, 2, 32, device="cuda"), torch.zeros(1, n, 32, device="cuda")
    q[..., 0], w = 1.0, torch.ones(1, n, 2, device="cuda") / 2
    k[..., 0] = torch.randint(0, 256, (n,), generator=rng, device="cuda").float()
    if kind == "rising":
        k[..., 0] = torch.arange(n, device="cuda") // 160
    elif kind == "equal":
        k[..., 0] = 3.0
    got = lightning_index(q[:, -100:].bfloat16(), k.bfloat16(), w[:, -100:], 2048, backend="triton")
    for i in (0, 50, 99):
        seen = k[0, : n - 99 + i, 0]
        want, at = (x[:2048] for x in seen.sort(dim=0, descending=True, stable=True))
        assert torch.equal(got.places[0, i, 0], at.int())
        assert torch.equal(got.scores[0, i, 0], want)


@pytest.mark.parametrize("topk", [1, 12, 2048, 4096])
@pytest.mark.parametrize("kind", ["random", "rising", "equal"])
def test_the_best_scores(kind, topk):
    """Beside a sort that leaves equal scores as they stand; rising ones fill a row's list again and again."""
    from ring_la.indexers import best_kernel

    rng = torch.Generator("cuda").manual_seed(4)
    s = torch.randn(2, 40, 3, 20_000, generator=rng, device="cuda")
    if kind == "rising":
        s = torch.arange(20_000.0, device="cuda").expand(s.shape)
    elif kind == "equal":
        s = s.mul(3).round()
    s = s.masked_fill(torch.rand(s.shape, generator=rng, device="cuda") < 0.2, -torch.inf)
    s[0, 7, :, 100:] = -torch.inf
    want, at = (x[..., :topk] for x in s.sort(dim=-1, descending=True, stable=True))
    places, scores = torch.empty_like(at, dtype=torch.int32), torch.empty_like(want)
    lists, first = best_kernel.BestLists(s.shape[:3], topk, s.device), 0
    for chunk in s.split((9000, 1, 7999, 3000), -1):
        lists.add(chunk, first)
        first += chunk.shape[-1]
    lists.write(places, scores)
    assert torch.equal(places, at.masked_fill(torch.isneginf(want), -1).int())
    assert torch.equal(scores, want)


LOSSES = [*((d, "torch", False) for d in LIMITS), *((torch.bfloat16, "triton", given) for given in (False, True))]


@pytest.mark.parametrize(("dtype", "backend", "given"), LOSSES)
def test_the_loss_of_an_indexer(dtype, backend, given):
    """Products of 16-bit numbers are wide: beside fp64 of the same numbers only sums are rounded, and its gradients.
    Attention's lse is formed with the loss, or given."""
    rng = torch.Generator("cuda").manual_seed(3)
    shapes = ((6, 128), (128,), (6,), (16, L + R), (1, L + R))
    x = [normal(rng, 2, T, *shape).to(dtype) for shape in shapes]
    x[2] = x[2].abs() / 6
    x[3] = x[3] / 24
    chosen = torch.rand(2, T, T, generator=rng, device="cuda").topk(96, -1).indices[:, :, None].int()
    scale, (aq, ak) = (N + R) ** -0.5, (t.double() for t in x[3:])
    lse = ring_la.sparse_attention(aq, ak, ak, chosen, scale=scale).lse if given else None

    def run_in(kind: torch.dtype) -> list[Tensor]:
        leaves = [t.to(kind).requires_grad_() for t in x[:3]]
        form = backend if kind == dtype else "torch"
        loss = lightning_loss(
            *leaves, chosen, *(t.to(kind) for t in x[3:]), attention_lse=lse, scale=scale, backend=form
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    errors = [error(a, b) for a, b in zip(run_in(dtype), run_in(torch.float64))]
    assert max(errors) < LIMITS[dtype], errors
