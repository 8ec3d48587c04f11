"""Sums of outer products and reading them: the kernels against PyTorch, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.kernels.fused import bidirectional as outer
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused.bidirectional_kernel import read, total  # noqa: E402
from ring_la.kernels.runtime.replayed_function import replayed_call  # noqa: E402

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
    true = results(k.double(), v.double(), cu, plain_total, outer.plain_read_state)
    return true, results(k, v, cu, total, read), results(k, v, cu, plain_total, outer.plain_read_state)


def plain_total(k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, scale: float) -> torch.Tensor:
    return scale * outer.plain_outer_sum(k, v, cu)


def results(k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, total, reading) -> list[torch.Tensor]:
    S = total(k, v, cu, 0.7)
    return [S, reading(k, S, cu, 0.5, False), reading(v, S, cu, 0.5, True)]


@pytest.mark.parametrize("name", CASES)
def test_sums_and_reads(name: str) -> None:
    true, *both = read_case(name)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


def test_what_is_replayed() -> None:
    """The third call on tensors of one class repeats the second's launches; one of another class does not."""
    calls = []

    def counted(k: torch.Tensor, v: torch.Tensor, cu: None) -> torch.Tensor:
        calls.append(k.shape[1])
        return total(k, v, cu, 1.0)

    for length, same in ((70, False), (70, False), (70, False), (70, True), (70, True), (70, True), (33, False)):
        k = torch.randn(1, length, 2, 16, device=DEVICE)
        v = k if same else torch.randn(1, length, 2, 16, device=DEVICE)
        S = replayed_call(counted, (k, v, None))
        assert error(S, outer.plain_outer_sum(k, v, None).double()) < 1e-5
        o = replayed_call(read, (k, S, None), 0.5, False)
        assert error(o, outer.plain_read_state(k, S, None, 0.5, False).double()) < 1e-5
    assert calls == [70, 70, 70, 70, 33]
