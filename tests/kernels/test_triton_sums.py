"""Gated sums in PyTorch, and by kernels (interpreted without a GPU), beside PyTorch's chunks."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ring_la
from ring_la.algebra import Rule
from ring_la.kernels import choice
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.pytorch.chunked import ChunkedRecurrence
from ring_la.kernels.pytorch.sums import PlainSums
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.runtime.triton_version import InterpretedKernel  # noqa: E402
from ring_la.kernels.sums import recurrence as sums  # noqa: E402
from ring_la.kernels.sums import walks  # noqa: E402
from ring_la.linear import one_device  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("local", [sums.GatedSums, PlainSums])
@pytest.mark.parametrize(
    ("T", "cu", "decay", "states"),
    [(21, None, "scalar", True), (19, (0, 0, 3, 19), "scalar", True), (9, None, "none", False),
     (12, (0, 12), "none", True), (6, None, "scalar", True)],
)  # fmt: skip
def test_walks_are_the_sums(monkeypatch, local, T, cu, decay, states):
    """Several spans and one, packed, without a decay, without states; more channels than one program takes."""
    for name, size in {"SPAN": 8, "TOKENS": 4, "CHANNELS": 4}.items():
        monkeypatch.setattr(walks, name, size)
    B, C, rule = 2 if cu is None else 1, 6, Rule("sum", decay)
    N = 1 if cu is None else len(cu) - 1
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(sum(shape)), device=DEVICE)  # noqa: E731
    one, v = torch.ones(B, T, 1, 1, device=DEVICE), draw(B, T, C, 1)
    inputs = Inputs(one, one, v, None if decay == "none" else -draw(B, T, C).abs())
    S0, dS = (draw(B, N, C, 1, 1), draw(B, N, C, 1, 1) + 1) if states else (None, None)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    wide = Inputs(*(None if x is None else x.double() for x in inputs))
    true = ChunkedRecurrence(rule, wide, offsets, 0.5)
    got = local(rule, inputs, offsets, 0.5)
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


def test_no_tokens_leave_the_state():
    S = torch.randn(1, 3, requires_grad=True)
    x, g = torch.zeros(1, 0, 3, requires_grad=True), torch.zeros(1, 0, 3)
    o, final = ring_la.hgrn(x, g, initial_state=S, output_final_state=True)
    assert o.shape == x.shape
    assert torch.equal(final, S)
    assert torch.equal(torch.autograd.grad(final.sum(), S)[0], torch.ones(1, 3))


class Seen(TorchDispatchMode):
    """The operations that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="leaves out what the interpreter does")
def test_hgrn_launches_nothing_but_its_kernels(monkeypatch):
    """A call that has come by, forward and backward: the same bits, and PyTorch does nothing but views."""
    monkeypatch.setattr(choice, "_unsupported_sums", sums.unsupported)
    x, g, do = (torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(n)) for n in range(3))
    x, g = x.requires_grad_(), (-g.abs()).requires_grad_()

    def called() -> tuple[torch.Tensor, ...]:
        o = ring_la.hgrn(x, g).o
        return o, *torch.autograd.grad(o, (x, g), do)

    first, again = called(), [called() for _ in range(3)]
    assert all(torch.equal(a, b) for found in again for a, b in zip(first, found))
    monkeypatch.setattr(InterpretedKernel, "__call__", lambda self, grid, args: None)
    monkeypatch.setattr(one_device, "traced", lambda *tensors: False)  # as without a mode that looks on
    with Seen() as seen:
        called()
    assert seen.operations <= {"detach", "view", "squeeze", "unsqueeze", "slice", "alias", "as_strided"}
