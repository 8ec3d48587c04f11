"""The kernels of gated sums beside PyTorch's chunks: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.pytorch.chunked import ChunkedRecurrence
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.sums import recurrence as sums  # noqa: E402
from ring_la.kernels.sums import walks  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("T", "cu", "decay", "states"),
    [(70, None, "scalar", True), (61, (0, 0, 7, 61), "scalar", True), (33, None, "none", False),
     (40, (0, 40), "none", True), (20, None, "scalar", True)],
)  # fmt: skip
def test_walks_are_the_sums(monkeypatch, T, cu, decay, states):
    """Several spans and one, packed, without a decay, without states; more channels than one program takes."""
    monkeypatch.setattr(walks, "SPAN", 32)
    B, C, rule = 2 if cu is None else 1, 67, Rule("sum", decay)
    N = 1 if cu is None else len(cu) - 1
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(sum(shape)), device=DEVICE)  # noqa: E731
    one, v = torch.ones(B, T, 1, 1, device=DEVICE), draw(B, T, C, 1)
    inputs = Inputs(one, one, v, None if decay == "none" else -draw(B, T, C).abs())
    S0, dS = (draw(B, N, C, 1, 1), draw(B, N, C, 1, 1) + 1) if states else (None, None)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    wide = Inputs(*(None if x is None else x.double() for x in inputs))
    true = ChunkedRecurrence(rule, wide, offsets, 0.5)
    got = sums.GatedSums(rule, inputs, offsets, 0.5)
    S0_wide, dS_wide = (None if x is None else x.double() for x in (S0, dS))
    back, back_wide = Backward(S0, draw(B, T, C, 1)), Backward(S0_wide, draw(B, T, C, 1).double())
    summary, want = got.summary(S0, True), true.summary(S0_wide, True)
    out, out_wide = got.output(S0), true.output(S0_wide)
    pairs = [(out.o, out_wide.o), (out.leaving, out_wide.leaving), (got.output(S0, summary).o, out_wide.o)]
    pairs += [(summary.leaving, want.leaving)] + ([] if decay == "none" else [(summary.transition, want.transition)])
    pairs.append((got.adjoint(back, dS).entering, true.adjoint(back_wide, dS_wide).entering))
    theirs = true.gradients(back_wide, dS_wide)
    for mine in (got.gradients(back, dS), got.gradients(back._replace(saved=out.saved), dS, got.adjoint(back, None))):
        pairs += [(mine.entering, theirs.entering), (mine.inputs.v, theirs.inputs.v)]
        pairs += [] if decay == "none" else [(mine.inputs.g, theirs.inputs.g)]
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    assert max(error(a, b) for a, b in pairs) < 1e-5
