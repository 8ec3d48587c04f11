"""The Triton grouped products against the loop: in Triton's interpreter without a GPU, on the GPU with one."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import interpreted

interpreted()
pytest.importorskip("triton")

from ring_la.grouped_gemm import grouped_gemm  # noqa: E402
from ring_la.kernels.grouped import GroupedProduct, load  # noqa: E402
from ring_la.kernels.grouped.tuning import Tiles  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TILES = (Tiles(64, 64, 32, warps=4),) if CUDA else (Tiles(16, 16, 16), Tiles(16, 16, 16, flatten=True, band=2))
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3}

LOW = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies bf16 as if it were integers
SHAPES = [(LOW, 16, 24), (LOW, 40, 8), (torch.float16, 10, 7)]


def operands(dtype, k, n, sizes=(5, 0, 40, 20), spare=5):
    """A, B, D and sizes; the rows of A and D past the sizes are NaN."""
    generator = torch.Generator().manual_seed(0)
    m = sum(sizes) + spare
    make = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    a, b, d = make(m, k), make(len(sizes), k, n), make(m, n)
    a[m - spare :], d[m - spare :] = float("nan"), float("nan")
    return a, b, d, torch.tensor(sizes, device=DEVICE)


def agree(call, tiles=None):
    out, expected = load("triton").compute(call, tiles), load("loop").compute(call)
    scale = expected.float().abs().max()
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert (out.float() - expected.float()).abs().max() <= TOLERANCE[call.x.dtype] * scale


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("dtype", "k", "n"), SHAPES)
def test_rows_product(dtype, k, n, by_columns, tiles):
    a, b, _, sizes = operands(dtype, k, n)
    b = b.mT.contiguous().mT if by_columns else b
    call = GroupedProduct("rows", a, b, sizes)
    agree(call, tiles)
    assert not load("triton").compute(call, tiles)[65:].any()


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("dtype", "k", "n"), SHAPES)
def test_outer_product(dtype, k, n, tiles):
    a, _, d, sizes = operands(dtype, k, n)
    agree(GroupedProduct("outer", a, d, sizes), tiles)


def test_fp32_and_the_table():
    a, b, d, sizes = operands(torch.float32, 12, 9)
    agree(GroupedProduct("rows", a, b, sizes))
    agree(GroupedProduct("outer", a, d, sizes))


def test_groups_do_not_mix():
    """A NaN in one group's rows stays in that group's products."""
    a, b, d, sizes = operands(torch.float16, 16, 16, sizes=(5, 3, 8), spare=0)
    a[5:8], d[5:8] = float("nan"), float("nan")
    rows = load("triton").compute(GroupedProduct("rows", a, b, sizes), TILES[0])
    outer = load("triton").compute(GroupedProduct("outer", a, d, sizes), TILES[0])
    assert rows[:5].isfinite().all()
    assert rows[8:].isfinite().all()
    assert outer[0].isfinite().all()
    assert outer[2].isfinite().all()


@pytest.mark.parametrize("sizes", [(9, 9, 9), (30, 1, 1), (-4, 3, 2), (0, 0, 0)])
def test_wrong_sizes_stay_inside(sizes):
    """Sizes on the device are not checked: too large, they are cut at M; too small, the rest is zero."""
    a, b, d, _ = operands(torch.float16, 16, 16, sizes=(4, 4, 4), spare=0)
    call = GroupedProduct("rows", a, b, torch.tensor(sizes, device=DEVICE))
    first = min(max(sizes[0], 0), 12)
    out = load("triton").compute(call, TILES[0])
    assert torch.allclose(out[:first].float(), (a[:first] @ b[0]).float(), atol=0.05, rtol=0.02)
    assert out.isfinite().all()
    assert load("triton").compute(GroupedProduct("outer", a, d, call.sizes), TILES[0]).shape == (3, 16, 16)


def test_more_groups_than_one_look():
    """The plan walks the groups 128 at a time."""
    sizes = [i % 3 for i in range(150)]
    a, b, _, sizes = operands(torch.float16, 8, 8, sizes=sizes, spare=2)
    agree(GroupedProduct("rows", a, b, sizes), TILES[0])


def test_gradients_are_those_of_the_loop():
    a, b, d, sizes = operands(torch.float32, 8, 8, sizes=(3, 0, 6), spare=0)
    grads = {}
    for backend in ("triton", "loop"):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        grads[backend] = torch.autograd.grad((grouped_gemm(x, y, sizes, backend=backend) * d).sum(), (x, y))
    for ours, theirs in zip(grads["triton"], grads["loop"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not grads["triton"][1][1].any()
