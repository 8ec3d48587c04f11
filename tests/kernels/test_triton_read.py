"""Sums of outer products and reading them: the kernels against PyTorch, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.kernels import outer
from ring_la.kernels.local import Inputs
from tests.kernels.triton_cases import error, interpreted

interpreted()

from ring_la.kernels.triton.local import TritonRecurrence  # noqa: E402
from ring_la.kernels.triton.read import read  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # batch, tokens, heads of q and k, heads of v, K, V, offsets
    "dense": (2, 300, 2, 2, 16, 24, None),
    "packed, grouped heads": (1, 90, 1, 3, 20, 16, (0, 0, 3, 70, 90)),
}


def read_case(name: str, dtype: torch.dtype = torch.float32, times: int = 1) -> tuple[list, list, list]:
    """(true, by the kernels, by PyTorch): S, o and the transposed form."""
    B, T, HK, H, K, V, offsets = CASES[name]
    torch.manual_seed(0)
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE) * times
    k = torch.randn(B, T * times, HK, K, device=DEVICE, dtype=dtype)
    v = torch.randn(B, T * times, H, V, device=DEVICE, dtype=dtype)
    true = results(k.double(), v.double(), cu, outer.plain_outer_sum, outer.plain_read_state)
    total = lambda k, v, cu: TritonRecurrence(outer.RULE, Inputs(k, k, v), cu, 1.0).summary(None, False)[1]  # noqa: E731
    return true, results(k, v, cu, total, read), results(k, v, cu, outer.plain_outer_sum, outer.plain_read_state)


def results(k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, total, reading) -> list[torch.Tensor]:
    S = total(k, v, cu)
    return [S, reading(k, S, cu, 0.5, False), reading(v, S, cu, 0.5, True)]


@pytest.mark.parametrize("name", CASES)
def test_sums_and_reads(name: str) -> None:
    true, *both = read_case(name)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))
