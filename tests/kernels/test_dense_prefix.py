"""The scan over spans of dense transitions of which flags say that some are 0, interpreted: the bits are those of the
same scan without flags, over transitions that are 0, and what is flagged is not read."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import interpreted

interpreted()

from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels.protocol import Inputs, SpanMaps  # noqa: E402
from ring_la.kernels.spans import dense  # noqa: E402
from ring_la.kernels.spans.plan import SpanPlan  # noqa: E402
from ring_la.kernels.spans.prefix import (  # noqa: E402
    dense_transitions_of_pieces,
    prefix,
    prefix_and_transitions,
)
from ring_la.kernels.spans.runs import Runs  # noqa: E402

LENGTH, CHUNK, H, K, V = 32, 16, 4, 16, 24
ROWS = {
    "none": lambda i: i < 0,
    "every": lambda i: i >= 0,
    "first": lambda i: i == 0,
    "mixed": lambda i: i % 3 == 1,
}
"""Of a head, which spans' transitions are 0."""


def drawn(B: int, T: int, cu: tuple[int, ...] | None) -> tuple[SpanPlan, SpanMaps, SpanMaps, Tensor]:
    """A plan of short spans, their maps with flags and without, and states of pieces."""
    torch.manual_seed(0)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    runs = Runs.of(T, LENGTH, CHUNK, offsets)
    q, v, g = torch.zeros(B, T, H, K), torch.zeros(B, T, H, V), torch.zeros(B, T, H)
    plan = SpanPlan.of(Rule("delta", "scalar"), Inputs(q, q, v, g, g), offsets, 1.0, (runs, runs))
    zero = torch.tensor([[which(i) for which in ROWS.values()] for i in range(runs.count)], dtype=torch.int32)
    zero = zero.expand(B, -1, -1).contiguous()
    A, own = torch.randn(B, runs.count, H, K, K) / 4, torch.randn(B, runs.count, H, K, V)
    flagged = zero[..., None, None].bool()
    known = SpanMaps("dense", own, A.masked_fill(flagged, torch.nan), True, zero)
    return plan, known, SpanMaps("dense", own, A.masked_fill(flagged, 0), True), torch.randn(B, runs.pieces, H, K, V)


CASES = [(2, 150, None), (1, 150, (0, 0, 20, 133, 150)), (1, 20, None)]


@pytest.mark.parametrize(("B", "T", "cu"), CASES, ids=["rows", "packed, one empty", "one span"])
@pytest.mark.parametrize("flags", [2, 64])
def test_bits_are_those_of_zero_transitions(monkeypatch, B, T, cu, flags):
    monkeypatch.setattr(dense, "FLAGS", flags)
    plan, known, plain, S = drawn(B, T, cu)
    used = known.own.shape[1] if cu is None else int(plan.spans.first.sum(0)[1])
    for S0, reverse, enter in itertools.product((None, S), (False, True), (False, True)):
        entering, leaving = prefix(plan, known, S0, reverse, enter)
        want_entering, want = prefix(plan, plain, S0, reverse, enter)
        assert torch.equal(leaving, want), (S0 is None, reverse, enter)
        assert not enter or torch.equal(entering[:, :used], want_entering[:, :used]), (S0 is None, reverse)


@pytest.mark.parametrize(("B", "T", "cu"), CASES, ids=["rows", "packed, one empty", "one span"])
def test_products_of_pieces(B, T, cu):
    """One that has a transition of 0 is 0."""
    plan, known, plain, S = drawn(B, T, cu)
    (_, want), (leaving, got) = (prefix_and_transitions(plan, maps, S) for maps in (plain, known))
    assert torch.equal(got, want)
    assert torch.equal(got, dense_transitions_of_pieces(plan, known))
    assert torch.equal(leaving, prefix(plan, plain, S, False)[1])
    has_spans = torch.ones(1, dtype=torch.bool) if cu is None else plan.spans.first[:, 1] > 0
    gone = (want == 0).flatten(-2).all(-1)
    assert gone[:, has_spans].any()
    assert not gone[:, ~has_spans].any()


def test_what_is_not_finite_ends_at_a_transition_of_0():
    """A product with 0 would be NaN."""
    plan, known, _, S = drawn(1, 150, None)
    entering, leaving = prefix(plan, known, torch.full_like(S, torch.inf), False)
    heads = dict(zip(ROWS, entering[0].unbind(1)))
    assert not heads["none"].isfinite().any()
    for name, behind in (("every", 1), ("first", 1), ("mixed", 2)):
        assert not heads[name][:behind].isfinite().any()
        assert heads[name][behind:].isfinite().all()
    assert leaving[0, 0, 1:].isfinite().all()
