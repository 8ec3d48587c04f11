"""The convolution's kernels against PyTorch's own operations and their autograd: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.conv_cases import CASES, both, conv_case
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import short_conv_kernel as conv  # noqa: E402
from ring_la.kernels.runtime.replayed_function import replayed  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_against_autograd(name: str) -> None:
    true, *by_either = conv_case(CASES[name])
    for got in by_either:
        assert [t.shape for t in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True) if t.numel())


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_the_second_launch_is_written_down_and_replayed(name: str) -> None:
    """Launches are written down the second time and replayed the third, on tensors as they lie."""
    calls = []

    def counted(function):
        def counting(*arguments):
            calls.append(function)
            return function(*arguments)

        return counting

    plain = conv.forward.__wrapped__, conv.backward.__wrapped__
    want = both(CASES[name], *plain)
    pair = [replayed(n, strided=True)(counted(function)) for n, function in zip((5, 7), plain)]
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(want, both(CASES[name], *pair), strict=True))
    assert calls == 2 * [*plain]
