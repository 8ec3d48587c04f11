"""Gradients of value heads summed over those that share a q/k head."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.spans import heads  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fused_delta.py on GPUs")
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32,)], ids=["both", "one"])
def test_sums(dtypes):
    grads = [torch.randn(2, 70, 6, 40) for _ in dtypes]
    found = heads.summed(grads, 2, dtypes)
    for x, dtype, got in zip(grads, dtypes, found, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, x.view(2, 70, 2, 3, 40).sum(3).to(dtype))


def test_a_long_call_is_one_that_a_gpu_can_launch(monkeypatch):
    """Of blocks along y and z there are 65,535 at most."""
    grids = []
    monkeypatch.setattr(heads, "launch", lambda kernel, grid, *arguments, **constants: grids.append((grid, constants)))
    dq, dk = (torch.empty(1, 2**20, 32, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    heads.summed((dq, dk), 16, (dq.dtype, dk.dtype))
    ((grid, constants),) = grids
    assert math.prod(grid) * constants["BR"] == 2 * 2**20 * 16
    assert all(n < 2**16 for n in grid[1:])
