"""The Triton kernels against the fp64 token loop, every rule, small shapes: interpreted without a GPU.

What a compiler may get wrong shows only in tests/gpu/test_triton.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Backward, Inputs, OutputUse
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.triton_cases import RULES, Case, error, errors, token_loop

interpreted()

from ring_la.kernels.families import recurrence, unsupported  # noqa: E402
from ring_la.kernels.pytorch.chunked import ChunkedRecurrence  # noqa: E402
from ring_la.kernels.spans import plan, table  # noqa: E402

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
    monkeypatch.setattr(table, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(table, "SAVED_WEIGHED", 0)  # as where there are many tokens
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_against_token_loop(rule: str, shape: str) -> None:
    worst = errors(Case(rule, **SHAPES[shape]), recurrence, DEVICE)
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
        dict(rule="additive_scalar", T=70, cu=(0, 1, 1, 50, 70), static=True),
        dict(rule="additive_scalar", B=2, T=64, strong=True),
        dict(rule="additive_scalar", T=70, cu=(0, 1, 1, 50, 70), strong=True, skips=True),
        dict(rule="additive_scalar", T=1, strong=True, skips=True),
        dict(rule="additive_scalar", T=70, strong=True, static=True, decay=30.0),
    ],
)
def test_large_inputs(more: dict, monkeypatch) -> None:
    """All gradients in one pass, or dk and dv, tensors by descriptor, and a decay that is the same at every token."""
    monkeypatch.setattr(table, "DESCRIBED", 0)
    monkeypatch.setattr(plan, "fits", lambda sizes, dtype: True)
    worst = errors(Case(K=64, V=64, **more), recurrence, DEVICE)
    assert all(e < 1e-4 for e in worst.values()), worst


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 1, 1, 75, 170)])
def test_segments_of_several_chunks(cu: tuple[int, ...] | None, bulk: bool, monkeypatch) -> None:
    """What a segment adds to the state's gradient is found in dq's pass."""
    monkeypatch.setattr(table, "LEAST_CHUNKS", 2)
    monkeypatch.setattr(table, "DESCRIBED", 0 if bulk else 2**40)
    monkeypatch.setattr(plan, "fits", lambda sizes, dtype: True)
    worst = errors(Case("additive_none", T=170, K=64, V=64, H=2, Hk=1, cu=cu), recurrence, DEVICE)
    assert all(e < 1e-4 for e in worst.values()), worst


def test_nothing_beyond_the_horizon_is_computed(monkeypatch) -> None:
    """What a segment has forgotten may be anything, and nothing of what enters it leaves."""
    monkeypatch.setattr(table, "WAVES", {"additive": 1, "delta": 1})
    x, rule = Case("delta_scalar", T=200).inputs(DEVICE), Rule("delta", "scalar")
    x = x._replace(g=torch.full_like(x.g, -0.5))  # e^−30 in 60 tokens
    summary = recurrence(rule, x, None, 1.0).summary(None, True)
    x.v[:, :32] = torch.nan
    assert summary.transition.count_nonzero() == 0
    assert torch.equal(recurrence(rule, x, None, 1.0).summary(None, True).leaving, summary.leaving)


@pytest.mark.parametrize("static", [False, True])
def test_additive_writes_beyond_the_horizon_are_not_read(static: bool, monkeypatch) -> None:
    """Neither what a segment has forgotten nor, for its adjoint, what comes when it has forgotten what entered."""
    monkeypatch.setattr(table, "SLOTS", dict.fromkeys(table.SLOTS, 1))
    x, rule = Case("additive_scalar", T=101, H=1, static=static).inputs(DEVICE), Rule("additive", "scalar")
    x = x._replace(g=torch.full_like(x.g[:, : 1 if static else None], -1.0).expand_as(x.g))  # e^−30 in 30 tokens
    pieces, do = torch.tensor((0, 5, 101)), torch.randn_like(x.v)

    def maps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        run = recurrence(rule, x, pieces, 1.0)
        summary = run.summary(None, True)
        return summary.transition, summary.leaving, run.adjoint(Backward(None, do), None).entering

    decay, *states = maps()
    torch.testing.assert_close(decay.flatten(), torch.tensor([-5.0, -96.0]).to(decay).exp())
    x.v[:, 5:30] = torch.nan
    do[:, -30:] = torch.nan
    assert all(map(torch.equal, states, maps()[1:]))


def test_long_keys_put_the_horizon_further_away() -> None:
    """Where β |k|² > 2 a state may grow while its gate decays."""
    T, k = 128, torch.nn.functional.normalize(torch.randn(16, device=DEVICE), dim=0)
    x = Case("delta_scalar", T=T, H=1).inputs(DEVICE)
    x = x._replace(k=k.expand_as(x.k), g=torch.full_like(x.g, -0.5), beta=torch.full_like(x.beta, 2.5))
    A = recurrence(Rule("delta", "scalar"), x, None, 1.0).summary(None, True).transition
    true = (torch.eye(16, device=DEVICE).double() - 2.5 * torch.outer(k, k).double()).matrix_power(T) * math.exp(-T / 2)
    assert error(A[0, 0, 0], true) < 1e-4


def test_a_decays_gradient_adds_up() -> None:
    """The sum of g·dg over tokens, as for Mamba-2's A: rounding must not lean to one side within a chunk."""
    case = Case("additive_scalar", T=512, H=1, K=64, V=64, dtype=torch.float16, decay=2.0)
    x, rule = case.inputs(DEVICE), Rule.parse(case.rule)
    do = torch.randn_like(x.v)
    wide = Inputs(*(None if t is None else t.double().requires_grad_() for t in x))
    o, _ = token_loop(rule, wide, None, 1.0, None)
    (true,) = torch.autograd.grad((o * do.double()).sum(), wide.g)
    saved = recurrence(rule, x, None, 1.0, OutputUse(saved=True)).output(None).saved
    dg = recurrence(rule, x, None, 1.0).gradients(Backward(None, do, saved), None).inputs.g
    assert error(dg, true) < 3e-4
    assert ((dg - true) * x.g).sum(1).norm() < 1.5e-3 * (true * x.g).norm()


@pytest.mark.parametrize("rule", ["additive_diagonal", "delta_diagonal", "dplr_diagonal"])
def test_weighed_keys_may_be_kept(rule: str, monkeypatch) -> None:
    monkeypatch.setattr(table, "SAVED_WEIGHED", 2**30)
    monkeypatch.setattr("ring_la.kernels.wy.recurrence.weighed_again", None)  # nobody weighs again
    x, do = Case(rule, T=70).inputs(DEVICE), torch.randn(1, 70, 2, 16, device=DEVICE)
    saved = recurrence(Rule.parse(rule), x, None, 1.0, OutputUse(saved=True)).output(None).saved
    found = [recurrence(Rule.parse(rule), x, None, 1.0).gradients(Backward(None, do, s), None) for s in (saved, ())]
    for kept, made in zip(found[0].inputs, found[1].inputs, strict=True):
        assert (kept is None) == (made is None)
        if kept is not None:
            torch.testing.assert_close(kept, made, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["additive_diagonal", "delta_diagonal", "dplr_diagonal"])
def test_decays_of_a_token_in_bf16(rule: str) -> None:
    """Most of what dg sums over a chunk cancels where a token forgets nearly all before it."""
    compute_bf16()
    case = Case(rule, T=64, H=4, K=32, V=32, decay=30.0, dtype=torch.bfloat16)
    worst = errors(case, recurrence, DEVICE)
    assert all(e < 6e-3 for e in worst.values()), worst


@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        ("additive_diagonal", {"dv": 2.7e-3, "dg": 2.3e-3}),
        ("delta_none", {"dv": 3.3e-3, "dbeta": 4e-3}),
        ("delta_diagonal", {"dv": 3.7e-3, "dbeta": 4.1e-3}),
        ("dplr_diagonal", {"dq": 3.8e-3, "dk": 3.8e-3, "dg": 4.3e-3}),
    ],
)
def test_what_is_rounded_once_only(rule: str, limits: dict[str, float]) -> None:
    """Pairs and their gradients, dO times the scale, and what M multiplies, where M is 1, are not rounded to bf16: each
    would be as much as a result."""
    compute_bf16()
    case = Case(rule, T=128, K=32, V=32, dtype=torch.bfloat16, states=False)
    worst = errors(case, recurrence, DEVICE)
    assert all(worst[n] < limit for n, limit in limits.items()), worst


@pytest.mark.parametrize("rule", ["additive_diagonal", "delta_none"])
def test_a_scale_of_zero(rule: str) -> None:
    x = Case(rule, T=20).inputs(DEVICE)
    run = recurrence(Rule.parse(rule), x, None, 0.0, OutputUse(saved=True))
    out = run.output(None)
    grads, _ = run.gradients(Backward(None, torch.ones_like(out.o), out.saved), torch.ones_like(out.leaving))
    assert (out.o == 0).all()
    assert (grads.q == 0).all()
    assert (grads.v != 0).any()
    assert all(g.isfinite().all() for g in grads if g is not None)


@pytest.mark.parametrize("rule", ["delta_none", "delta_scalar", "delta_diagonal"])
def test_beta_of_zero_in_fp16(rule: str) -> None:
    """What the backward pass leaves is multiplied by β, which the gradient of β divides by: in fp16 that takes care."""
    compute_bf16()
    worst = errors(Case(rule, T=70, K=32, V=32, dtype=torch.float16, states=False), recurrence, DEVICE)
    assert all(e < 2e-3 for e in worst.values()), worst


def test_non_contiguous_inputs() -> None:
    case = Case("additive_scalar", T=40)

    def strided(rule, inputs, *others):
        spread = (None if x is None else x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs)
        return recurrence(rule, Inputs(*spread), *others)

    assert max(errors(case, strided, DEVICE).values()) < 1e-4


def test_a_rule_without_kernels_is_refused_by_name() -> None:
    """A dplr rule with one decay a head is well formed, and PyTorch's; it must not enter kernels made for another."""
    x, rule = Case("dplr_diagonal", T=30).inputs(DEVICE), Rule("dplr", "scalar")
    x = x._replace(g=x.g[..., 0].contiguous())
    assert "dplr_scalar" in unsupported(rule, x)
    assert unsupported(Rule("dplr", "diagonal"), x) == ""
    o, end = token_loop(rule, Inputs(*(None if t is None else t.double() for t in x)), None, 0.5, None)
    out = ChunkedRecurrence(rule, x, None, 0.5).output(None)
    assert max(error(out.o, o), error(out.leaving, end)) < 1e-5
