"""TTT-Linear's kernels, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.gradient_step_cases import errors
from tests.support.interpreter import interpreted

interpreted()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("T", "size", "position"), [(96, 16, None), (75, 16, None), (70, 16, 21), (64, 64, 0)]
)  # whole calls, with and without a rest; runs of a document
def test_kernels_are_the_plain_form(T, size, position):
    found = errors(2, T, 1, 20, size, position, torch.float32, DEVICE)
    assert max(found.values()) < 1e-5, found
