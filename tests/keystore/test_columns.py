"""A token over keys where they lie: products and the kernel (interpreted without a GPU), against sums in fp64."""

from __future__ import annotations

import pytest
import torch

from ring_la.keystore.columns import by_products
from ring_la.keystore.static import fits_kernel
from tests.support.columns import Shape, draw, in_full
from tests.support.interpreter import compute_bf16, interpreted

interpreted()

from ring_la.keystore import decode_kernel  # noqa: E402

if not torch.cuda.is_available():
    compute_bf16()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "a head for all": Shape(2, 5, 1, 70, 40, 24, 0, torch.float32),
    "two for each key": Shape(3, 4, 2, 300, 32, 32, 0, torch.bfloat16),
    "latents": Shape(1, 20, 1, 130, 48, 48, 16, torch.bfloat16),
}


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_every_way_is_the_sum(case: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "LEAST", 32)  # several parts, some of them empty
    q, keys = draw(CASES[case], DEVICE)
    want = in_full(q, keys, 0.3, softcap)
    for way in (decode_kernel.decode_columns, by_products):
        o, lse = way(q, keys, 0.3, softcap)
        torch.testing.assert_close(o.double(), want[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=2e-5)


def test_the_kernel_is_asked_for_what_it_has_room_for() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for K, V, R, dtype, fits in (
        (256, 256, 0, bf16, True),
        (512, 512, 64, bf16, True),
        (128, 128, 0, fp32, True),
        (288, 288, 0, bf16, False),
        (256, 256, 0, fp32, False),
        (512, 512, 64, fp32, False),
        (64, 64, 0, torch.float64, False),
    ):
        assert fits_kernel(*draw(Shape(1, 1, 1, 8, K, V, R, dtype), DEVICE)) == fits, (K, V, R, dtype)
