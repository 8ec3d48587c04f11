"""The kernels that scale keys by how much has been written, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import interpreted
from tests.support.precondition_cases import errors

interpreted()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cu", [None, (0, 1, 1, 66, 70)])
def test_preconditioned_keys_are_the_token_loop(cu):
    """Two tiles of tokens and of channels; packed, an empty document too."""
    worst = errors(70, 36, cu, torch.float32, DEVICE)
    assert all(e < 1e-5 for e in worst.values()), worst
