"""Sums of outer products and reading them: the kernels against PyTorch, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.kernels.fused import bidirectional as outer
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.read_cases import CASES, DEVICE, read_case, turned_case
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused.bidirectional_kernel import read, total  # noqa: E402
from ring_la.kernels.runtime.replayed_function import replayed_call  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_sums_and_reads(name: str) -> None:
    true, *both = read_case(name)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_rounded_once_behind_the_division(name: str) -> None:
    """States are taken as they are, not in bf16."""
    compute_bf16()
    true, got, _ = read_case(name, torch.bfloat16)
    assert all(error(g, t) < 0.4 * torch.finfo(torch.bfloat16).eps for g, t in zip(got[3:], true[3:], strict=True))


@pytest.mark.parametrize(("D", "tables"), [(12, 1), (16, 2), (112, 1)])
def test_turned(D: int, tables: int) -> None:
    true, got, _ = turned_case(D, tables=tables)
    assert all(error(g, t) < 1e-6 for g, t in zip(got, true, strict=True))


def test_tensors_of_one_class_replay_and_others_do_not() -> None:
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
