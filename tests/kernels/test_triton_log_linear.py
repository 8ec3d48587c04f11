"""Log-linear attention's kernels, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import compute_bf16, interpreted
from tests.support.log_linear_cases import errors

interpreted()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RUNS = {
    "one document": ((0, 200, 0),),
    "several": ((0, 7, 0), (7, 8, 0), (8, 140, 0), (140, 150, 0)),
    "later parts": ((0, 100, 37), (100, 164, 64), (164, 230, 190)),
}


@pytest.mark.parametrize("runs", RUNS)
def test_kernels_are_the_plain_form(runs):
    found = errors(2, (1, 2), (20, 12), RUNS[runs], torch.float32, DEVICE)
    assert max(found.values()) < 1e-5, found


def test_kernels_in_bf16():
    if DEVICE == "cpu":
        compute_bf16()
    found = errors(1, (2, 2), (16, 16), ((0, 300, 0),), torch.bfloat16, DEVICE)
    assert max(found.values()) < 6e-3, found
