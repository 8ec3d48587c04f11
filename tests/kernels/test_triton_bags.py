"""Sums of rows by bag against PyTorch's own operations and their autograd: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.gate_cases import DEVICE
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import bags, bags_kernel  # noqa: E402
from ring_la.nn.expert_ranks import Bags  # noqa: E402


def bag_case(D: int, dtype: torch.dtype) -> tuple[Bags, list[torch.Tensor]]:
    """Bags of 0 to 3 of 11 entries, in any order, and y, weight, do; the largest entry number is of no bag's range."""
    generator = torch.Generator().manual_seed(0)
    place = torch.tensor([[4, 99, 0], [99, 99, 99], [1, 2, 99], [10, 9, 8], [7, 99, 6], [5, 3, 99]])
    tensors = [torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in ((11, D), (11,), (6, D))]
    return Bags.of(place.to(DEVICE), 11), tensors


@pytest.mark.parametrize("D", [5, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gradients(D: int, dtype: torch.dtype) -> None:
    of, (y, weight, do) = bag_case(D, dtype)
    wide = [t.double().requires_grad_() for t in (y, weight)]
    true = bags.plain_sums(*wide, of.entries, of.starts)
    expected = [true, *torch.autograd.grad(true, wide, do.double())]
    ours = [bags_kernel.forward(y, weight, of.entries, of.starts), *bags_kernel.backward(do, y, weight, of.row)]
    plain = [bags.plain_sums(y, weight, of.entries, of.starts), *bags.plain_gradients(do, y, weight, of.row)]
    for got, known, want in zip(ours, plain, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, dtype)
        assert error(known, want) < 2**-8
        assert error(got, want) < (1e-5 if dtype == torch.float32 else 2**-8)  # the interpreter cuts bf16 off
    alone = bags_kernel.forward(y, None, of.entries, of.starts)
    assert error(alone, bags.plain_sums(y.double(), None, of.entries, of.starts)) < {4: 1e-6, 2: 4e-3}[dtype.itemsize]
    assert not alone[1].any(), "a bag without an entry"


def test_nothing_to_sum() -> None:
    none, starts = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    y = torch.empty(0, 8, device=DEVICE)
    assert torch.equal(bags_kernel.forward(y, None, none, starts), torch.zeros(3, 8, device=DEVICE))
    assert bags_kernel.forward(y, None, none, starts[:1]).shape == (0, 8)
    dy, dweight = bags_kernel.backward(torch.empty(3, 8, device=DEVICE), y, y[:, 0], none)
    assert (dy.shape, dweight.shape) == ((0, 8), (0,))


def test_what_the_kernels_do_not_take() -> None:
    assert bags_kernel.unsupported(torch.empty(2, 8, dtype=torch.float64)) == "dtype torch.float64"
    assert bags_kernel.unsupported(torch.empty(2, 8193)) == "rows of 8193"
    assert not bags_kernel.unsupported(torch.empty(2, 8192))
