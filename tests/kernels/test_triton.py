"""The Triton kernels against the fp64 token loop, every rule, small shapes: interpreted without a GPU.

What a compiler may get wrong shows only in tests/gpu/check_triton.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_cases import RULES, Case, errors, interpreted

interpreted()

from ring_la.kernels.triton import local, table  # noqa: E402

SHAPES = {
    "one segment": dict(T=30, states=False),
    "one token": dict(T=1),
    "segments": dict(T=100, B=2, K=32),
    "packed": dict(T=100, cu=(0, 1, 1, 75, 100)),
    "odd heads, strong decay": dict(T=64, K=24, V=40, decay=30.0),
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(table, "LEAST", 1)
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_against_token_loop(rule: str, shape: str) -> None:
    worst = errors(Case(rule, **SHAPES[shape]), local.TritonRecurrence, DEVICE)
    assert all(e < 1e-4 for e in worst.values()), worst


@pytest.mark.parametrize(
    "more",
    [
        dict(rule="additive_none", B=2, T=64),
        dict(rule="additive_none", T=70, cu=(0, 1, 1, 50, 70)),
        dict(rule="additive_scalar", T=70),
        dict(rule="additive_scalar", T=70, cu=(0, 1, 1, 50, 70)),
        dict(rule="additive_scalar", B=2, T=64, gate=False),
        dict(rule="additive_scalar", T=70, gate=False, static=True),
    ],
)
def test_large_inputs(more: dict, monkeypatch) -> None:
    """dk and dv in one pass, tensors by descriptor, and a decay that is the same at every token."""
    monkeypatch.setattr(table, "BULK", {0: 0, 1: 0})
    monkeypatch.setattr(local.TritonRecurrence, "_fused", True)
    worst = errors(Case(K=64, V=64, **more), local.TritonRecurrence, DEVICE)
    assert all(e < 1e-4 for e in worst.values()), worst


def test_non_contiguous_inputs() -> None:
    case = Case("additive_scalar", T=40)

    class Strided(local.TritonRecurrence):
        def __init__(self, rule, inputs, cu, scale, *kept):
            spread = (None if x is None else x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs)
            super().__init__(rule, type(inputs)(*spread), cu, scale, *kept)

    assert max(errors(case, Strided, DEVICE).values()) < 1e-4
