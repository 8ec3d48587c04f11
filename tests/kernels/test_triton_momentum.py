"""The kernels of the momentum delta rule, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import compute_bf16, interpreted
from tests.support.momentum_cases import errors

interpreted()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "rows": (2, 2, 20, 40, (0, 75), True),
    "packed": (1, 2, 16, 36, (0, 3, 3, 70, 200), True),
    "no states": (1, 1, 64, 16, (0, 130), False),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_the_plain_form(case):
    found = errors(*CASES[case], torch.float32, DEVICE)
    assert max(found.values()) < 1e-5, found


def test_kernels_in_bf16():
    compute_bf16()
    found = errors(1, 2, 64, 64, (0, 200), True, torch.bfloat16, DEVICE)
    assert max(found.values()) < 1e-2, found
