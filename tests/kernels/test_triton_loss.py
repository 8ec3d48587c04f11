"""The cross-entropy kernel against PyTorch's own operations in fp64: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.models.loss import IGNORE
from tests.support.interpreter import interpreted
from tests.support.loss_cases import DEVICE, loss_case
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import cross_entropy_kernel as cross_entropy  # noqa: E402


@pytest.mark.parametrize("V", [7, 5000])
def test_losses_and_gradient(V: int) -> None:
    true, got, _ = loss_case(V)
    assert not got[0][1]  # a row that does not count
    assert not got[1][1].any()
    assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


def test_large_logits_and_no_gradient() -> None:
    logits = torch.tensor([[1e4, -1e4, 9999.0], [-3e4, -3e4, -3e4]], device=DEVICE)
    before, targets = logits.clone(), torch.tensor([2, 1], device=DEVICE)
    got = cross_entropy.forward(logits, targets, IGNORE, False)
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(before, targets, reduction="none"))
    assert torch.equal(logits, before)
