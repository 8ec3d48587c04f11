"""Grouped products on a GPU, each backend against fp64: `pytest -m gpu tests/gpu/test_grouped.py`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.grouped.checks import CHECKS, check_product, check_training
from benchmarks.grouped.products import KINDS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(len(CHECKS)))
def test_every_back_end(case, kind, record_property):
    torch.manual_seed(case)
    lines = check_product(CHECKS[case], kind)
    record_property("lines", lines)
    assert [line for line in lines if not line.get("ok", True)] == []
    assert any("ok" in line for line in lines)


def test_gradients_without_the_host(record_property):
    """Without synchronisation, compiled, and captured."""
    lines = check_training()
    record_property("lines", lines)
    assert [line for line in lines if not line["ok"]] == []
