"""A token over keys in columns by our kernel, against fp64: `pytest -m gpu tests/gpu/test_decoded_columns.py`."""

from __future__ import annotations

import pytest
import torch

from tests.support.columns import Shape, draw, in_full

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    *(Shape(3, 4 * group, 4, 3000, K, K, 0, BF16) for K in (64, 96, 128, 192, 256) for group in (1, 5, 40)),
    Shape(3, 12, 4, 700, 64, 128, 0, FP16),
    Shape(2, 8, 8, 5000, 128, 128, 0, FP32),
    *(Shape(2, H, 1, 5000, 512, 512, 64, BF16) for H in (16, 128)),
]


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_key_is_read(shape, softcap, record_property):
    from ring_la.keystore.decode_kernel import decode_columns

    q, keys = draw(shape, "cuda")
    o, lse = in_full(q, keys, shape.K**-0.5, softcap)
    got, got_lse = decode_columns(q, keys, shape.K**-0.5, softcap)
    error = float((got - o).norm() / o.norm())
    record_property("errors", {"o": error})
    assert error < 2e-4  # fp32 sums of 16-bit numbers; weights are two of those
    torch.testing.assert_close(got_lse.double(), lse, atol=1e-4, rtol=1e-5)
