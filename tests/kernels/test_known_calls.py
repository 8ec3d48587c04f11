"""Passes that were played before are played at once, with the bits of the call they were made from."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import interpreted
from tests.support.triton_cases import Case

interpreted()

import ring_la  # noqa: E402
from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels import choice  # noqa: E402
from ring_la.kernels.families import recurrence  # noqa: E402
from ring_la.kernels.known import KnownCall, gradients  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs, OutputUse  # noqa: E402
from ring_la.kernels.replay import Replay, root  # noqa: E402
from ring_la.kernels.wy import one_launch  # noqa: E402
from ring_la.recurrences import run  # noqa: E402

RULES = ("additive_scalar", "delta_scalar")


@pytest.fixture(autouse=True)
def nothing_known():
    root.cache_clear()
    yield
    root.cache_clear()


def drawn(rule: str, seed: int) -> tuple[Inputs, None, torch.Tensor]:
    torch.manual_seed(seed)
    inputs = Inputs(*Case(rule, T=40, H=1, K=16, V=16).inputs("cpu"))
    return inputs, None, torch.randn(1, 1, 1, 16, 16)


def called(known: KnownCall, rule: str, tensors, use: OutputUse) -> tuple[list[torch.Tensor | None], bool]:
    """What a call gives, and whether it was known how."""
    inputs, cu, S0 = tensors
    again = known.ready((*inputs, cu, S0))
    if again is not None:
        out = again()
    else:
        local = Replay(Rule.parse(rule), inputs, cu, 0.3, use)
        out = local.output(S0)
        known.learn(local, (*inputs, cu, S0))
    return [out.o, out.leaving, *map(shape_of, out.saved)], again is not None


def wanted(rule: str, tensors, use: OutputUse) -> list[torch.Tensor | None]:
    inputs, cu, S0 = tensors
    out = recurrence(Rule.parse(rule), inputs, cu, 0.3, use).output(S0)
    return [out.o, out.leaving, *map(shape_of, out.saved)]


def shape_of(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of a shape: what is behind the last token of what is saved is never read."""
    return None if x is None else torch.tensor(x.shape)


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("use", [OutputUse(), OutputUse(saved=True, alone=True)], ids=["plain", "saved"])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_known_is_the_same(rule: str, use: OutputUse) -> None:
    known, took = KnownCall(), []
    for seed in range(5):
        tensors = drawn(rule, seed)
        got, again = called(known, rule, tensors, use)
        took.append(again)
        assert same(got, wanted(rule, tensors, use))
    assert took == [False, False, False, True, True]  # seen, written down, played, then at once


@torch.no_grad()
def test_what_lies_otherwise_goes_the_long_way() -> None:
    known, use = KnownCall(), OutputUse()
    for seed in range(4):
        called(known, "delta_scalar", drawn("delta_scalar", seed), use)
    inputs, cu, S0 = drawn("delta_scalar", 4)
    strided = inputs._replace(q=inputs.q.transpose(1, 3).contiguous().transpose(1, 3))
    off = torch.empty(inputs.v.numel() + 1)[1:].view(inputs.v.shape).copy_(inputs.v)
    for given in (strided, inputs._replace(v=off)):
        got, again = called(known, "delta_scalar", (given, cu, S0), use)
        assert not again
        assert same(got, wanted("delta_scalar", (inputs, cu, S0), use))


@torch.no_grad()
def test_a_tensor_given_twice_is_known_as_that() -> None:
    """The tape of such a call reads one tensor in two places; the last one's are two."""
    known, use, took = KnownCall(), OutputUse(), []
    for seed in range(6):
        inputs, cu, S0 = drawn("additive_scalar", seed)
        given = (inputs if seed == 5 else inputs._replace(k=inputs.q), cu, S0)
        got, again = called(known, "additive_scalar", given, use)
        took.append(again)
        assert same(got, wanted("additive_scalar", given, use))
    assert took == [False, False, False, True, True, False]


@torch.no_grad()
def test_what_is_no_longer_so_is_not_known(monkeypatch) -> None:
    known, use, rule = KnownCall(), OutputUse(), "delta_scalar"
    for seed in range(4):
        called(known, rule, drawn(rule, seed), use)
    tensors = drawn(rule, 4)
    flat = (*tensors[0], *tensors[1:])
    assert known.ready(flat) is not None
    assert known.ready(flat, border=object()) is None
    with monkeypatch.context() as m:
        m.setattr(one_launch, "LEAST", 1)
        assert known.ready(flat) is None
    root.cache_clear()
    assert known.ready(flat) is None


def backward_of(known: KnownCall | None, rule: str, tensors, do: torch.Tensor, dS: torch.Tensor | None):
    """A call's gradients behind its forward pass, and whether a backend was begun for them."""
    inputs, cu, S0 = tensors
    saved = Replay(Rule.parse(rule), inputs, cu, 0.3, OutputUse(saved=True, alone=True)).output(S0).saved
    begun = []

    def begin() -> Replay:
        begun.append(1)
        return Replay(Rule.parse(rule), inputs, cu, 0.3)

    made = gradients(known, begin, inputs, cu, Backward(S0, do, saved), dS)
    return [*made.inputs, made.entering], bool(begun)


@torch.no_grad()
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_are_known_are_the_same(rule: str, final: bool) -> None:
    known, took = KnownCall(), []
    for seed in range(6):
        tensors = drawn(rule, seed)
        do = torch.randn_like(tensors[0].v)
        dS = torch.randn(1, 1, 1, 16, 16) if final or seed == 5 else None  # the last one's are another kind
        got, begun = backward_of(known, rule, tensors, do, dS)
        took.append(begun)
        inputs, cu, S0 = tensors
        real = recurrence(Rule.parse(rule), inputs, cu, 0.3, OutputUse(saved=True, alone=True))
        want = recurrence(Rule.parse(rule), inputs, cu, 0.3).gradients(Backward(S0, do, real.output(S0).saved), dS)
        assert same(got, [*want.inputs, want.entering])
    assert took == [True, True, True, False, False, not final]


@torch.no_grad()
def test_gradients_of_what_lies_otherwise_go_the_long_way() -> None:
    known, rule = KnownCall(), "delta_scalar"
    for seed in range(4):
        tensors = drawn(rule, seed)
        backward_of(known, rule, tensors, torch.randn_like(tensors[0].v), None)
    do = torch.randn_like(tensors[0].v)
    want, begun = backward_of(known, rule, tensors, do, None)
    assert not begun
    got, begun = backward_of(known, rule, tensors, do.transpose(1, 3).contiguous().transpose(1, 3), None)
    assert begun
    assert same(got, want)


def test_packed_calls_are_known_by_how_many_documents_there_are(monkeypatch) -> None:
    """Where offsets are not read, as on GPUs."""
    begun: list[int] = []
    begin = Replay.__init__

    def counted(self: Replay, *args: object, **named: object) -> None:
        begun.append(1)
        begin(self, *args, **named)

    monkeypatch.setattr(Replay, "__init__", counted)
    monkeypatch.setattr(choice, "unsupported", lambda *args, **named: "")
    monkeypatch.setattr(run, "offsets_are_read", lambda offsets: False)
    took = []
    for seed, cut in enumerate((10, 25, 40, 1, 20)):
        inputs, _, _ = drawn("delta_scalar", seed)
        leaves = [x.requires_grad_() for x in inputs if x is not None]
        cu, do = torch.tensor([0, cut, 40], dtype=torch.int32), torch.randn_like(inputs.v)
        begun.clear()
        o = ring_la.gated_delta_rule(*leaves, cu_seqlens=cu).o
        got = [o, *torch.autograd.grad(o, leaves, do)]
        took.append(len(begun))
        wide = [x.detach().double().requires_grad_() for x in leaves]
        want = ring_la.gated_delta_rule(*wide, cu_seqlens=cu, backend="reference").o
        for x, y in zip(got, [want, *torch.autograd.grad(want, wide, do.double())], strict=True):
            assert (x - y).norm() < 1e-4 * y.norm()
    assert took == [2, 2, 2, 0, 0]
