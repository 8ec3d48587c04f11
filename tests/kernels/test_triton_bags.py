"""Sums of rows by bag against PyTorch's own operations and their autograd: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.bag_cases import bag_case
from tests.support.gate_cases import DEVICE
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import bags_kernel  # noqa: E402


@pytest.mark.parametrize("D", [5, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gradients(D: int, dtype: torch.dtype) -> None:
    for want, got, plain in zip(*bag_case(D, dtype), strict=True):
        assert (got.shape, got.dtype) == (plain.shape, plain.dtype) == (want.shape, dtype)
        assert error(plain, want) < 2**-8
        assert error(got, want) < (1e-5 if dtype == torch.float32 else 2**-8)  # the interpreter cuts bf16 off
        assert len(got) != 6 or not got[1].any(), "a bag without an entry"


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
