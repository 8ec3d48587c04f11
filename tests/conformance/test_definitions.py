"""Definitions of recurrences: cases cover them, one of one's own is like any other, what is wrong with one is named."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.algebra import Rule
from ring_la.define import KEY, QUERY, RATE, VALUE, Argument
from ring_la.kernels import Inputs
from ring_la.recurrences import RECURRENCES as DEFINITIONS
from ring_la.recurrences.definition import Recurrence
from ring_la.recurrences.recurrence import recurrence
from ring_la.testing import check_recurrence
from tests.conformance.calls import H, K, V, run
from tests.support.recurrence_cases import COMPOSED, RECURRENCES, error, make_inputs


def test_the_cases_cover_the_registry():
    assert {r.name for r in DEFINITIONS} == {*RECURRENCES, *COMPOSED}
    for r in DEFINITIONS:  # what tables, examples and benchmarks are made of
        assert r.equation
        assert list(r.arguments) == [n for n in inspect.signature(r.describe).parameters if n in r.arguments]


def test_a_definition_is_what_its_function_is():
    for r in DEFINITIONS:
        function = getattr(ring_la, r.name)
        assert function.definition is r
        assert "own" in vars(r)  # found before a compiler follows a call: it cannot find it
        assert r.reference is getattr(reference, r.name)
        assert f"Source: {r.paper}." in function.__doc__
    x = make_inputs("gla", 1, 9)
    scaled = recurrence(paper="none", default_scale=0.25)(ring_la.gla.definition.describe)
    assert error(scaled(**x).o, ring_la.gla(**x, scale=0.25).o) == 0
    assert "None: 0.25." in scaled.__doc__


def test_a_recurrence_of_ones_own():
    """What is defined outside the package is a public function like any other."""

    @recurrence(paper="none")
    def leaky(q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Recurrence:
        """S ← σ(rate) S + k vᵀ."""
        return Recurrence(Rule("additive", "scalar"), Inputs(q, k, v, F.logsigmoid(rate)), names={"g": "rate"})

    x = make_inputs("simple_gla", 2, 33, H=H, K=K, V=V)
    rate = x.pop("g")
    state = torch.randn(2, H, K, V, dtype=torch.float64, requires_grad=True)
    cotangents = torch.randn(2, 33, H, V, dtype=torch.float64), torch.randn(2, H, K, V, dtype=torch.float64)
    got = run(leaky, x | {"rate": rate}, state, cotangents)
    want = run(lambda rate, **y: reference.simple_gla(g=F.logsigmoid(rate), **y), x | {"rate": rate}, state, cotangents)
    assert max(map(error, got, want)) < 1e-10
    with pytest.raises(ring_la.ArgumentError, match=r"^rate: expected"):
        leaky(**x, rate=rate[:, :5])
    with pytest.raises(ring_la.UnsupportedError, match=r"^backend: expected .+ leaky"):
        leaky(**x, rate=rate, backend="reference")


@pytest.mark.parametrize(("write", "decay"), [("delta", "rows"), ("deltas", "scalar"), ("additive", "")])
def test_rules_are_checked_where_they_are_made(write, decay):
    wrong = "decay" if write in ("additive", "delta") else "write"
    with pytest.raises(ring_la.ArgumentError, match=f"{wrong}: expected one of"):
        Rule(write, decay)
    with pytest.raises(ring_la.ArgumentError, match=f"{wrong}: expected one of"):
        Rule.parse(f"{write}_{decay}")


def test_what_is_wrong_with_a_description_is_named():
    def sink(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Recurrence:
        """S ← S + k (v + s)ᵀ."""
        return Recurrence(Rule("additive", "none"), Inputs(q, k, v + s[..., None]))

    def scaled(q: Tensor, scale: float) -> Tensor:
        """Nothing."""
        return q * scale

    declared = {"q": QUERY, "k": KEY, "v": VALUE, "s": RATE}
    own = recurrence(paper="none", arguments=declared)(sink)
    x = make_inputs("gated_delta_rule", 1, 9)
    q, k, v, s = (x[n] for n in ("q", "k", "v", "beta"))
    empty = recurrence(paper="none")(lambda q: q)
    worded = recurrence(paper="none")(lambda q: Recurrence("additive", Inputs(q, q, q)))
    without = recurrence(paper="none")(lambda q: Recurrence(Rule("additive", "none"), None))
    for match, wrong in {
        r"s: expected \[B,T,H\] = \[1, 9, 4\], got \[1, 9, 2\]": lambda: own(q, k, v, s[..., :2]),
        "expected a description that returns a Recurrence, got Tensor": lambda: empty(q),
        "expected a Recurrence whose rule is of Rule, got str": lambda: worded(q),
        "expected a Recurrence whose inputs is of Inputs, got NoneType": lambda: without(q),
        "s: expected an Argument whose shape": lambda: recurrence(
            paper="none", arguments=declared | {"s": Argument(3)}
        )(sink),
        "arguments: expected names out of the description's": lambda: recurrence(
            paper="none", arguments=declared | {"p": KEY}
        )(sink),
        "scale: expected a name that is no common keyword's": lambda: recurrence(paper="none")(scaled),
        "s: expected a kind out of": lambda: recurrence(
            paper="none", arguments=declared | {"s": Argument("BTH", "rates")}
        )(sink),
        "s: expected an Argument": lambda: recurrence(paper="none", arguments=declared | {"s": Argument("bth")})(sink),
        "documents: expected a list of names out of": lambda: check_recurrence(ring_la.gla, documents=("none",)),
        "function: expected one that": lambda: check_recurrence(sink),
    }.items():
        with pytest.raises(ring_la.ArgumentError, match=match):
            wrong()
