"""The kernels of the momentum delta rule, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.linear.stretches import DocumentRun
from ring_la.recurrences import momentum
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.momentum_cases import arguments, errors, split_errors

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


@pytest.mark.parametrize("packed", [False, True])
def test_calls_go_by_the_kernels(monkeypatch, packed):
    """What a call does on a GPU, with shared keys and states, is what PyTorch's operations do."""
    monkeypatch.setattr(momentum, "unsupported", lambda given: "")
    q, k, *rest = arguments(90, 2 if packed else 1)
    *tokens, S, M = q[:, :, :1], k[:, :, :1], *rest
    cu = dict(cu_seqlens=torch.tensor([0, 20, 90])) if packed else {}
    whole = dict(initial_state=(S, M), output_final_state=True, **cu)
    plain, found = (ring_la.momentum_delta_rule(*tokens, backend=b, **whole) for b in ("torch", "triton"))
    for a, b in zip((found.o, *found.final_state), (plain.o, *plain.final_state)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_run_of_tokens_goes_by_the_kernels():
    q, k, v, p, *gates, S, M = arguments(70, 1)
    given = (torch.stack([S, M], 2), v, q, k, p, *(x[..., None] for x in gates))
    run = DocumentRun(0, 70, 0, 0, True, True, 0)
    for a, b in zip(*(momentum.MomentumRun(0.5, kernels)(run, *given) for kernels in (True, False))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 and narrow heads, which the kernels do not take on GPUs")
@pytest.mark.parametrize("documents", ["small", "small packed"])
def test_ranks_go_by_the_kernels(ranks, documents):
    for rank, found in enumerate(ranks.run(2, split_errors, documents)):
        assert max(found.values()) < 2e-5, (rank, found)
