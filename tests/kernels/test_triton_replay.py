"""Replayed calls are the calls they were made from, to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import interpreted
from tests.support.triton_cases import RULES, Case

interpreted()

from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels.families import recurrence  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs, OutputUse  # noqa: E402
from ring_la.kernels.replay import Replay, root  # noqa: E402
from ring_la.kernels.runtime.recorder import layout  # noqa: E402
from ring_la.kernels.spans import table  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = 64 if DEVICE == "cuda" else 16
CASES = {
    "dense": dict(T=40, H=1, K=WIDE, V=WIDE),
    "packed": dict(T=40, cu=(0, 1, 1, 36, 40), K=WIDE, V=WIDE),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(table, "LEAST_CHUNKS", 1)
    root.cache_clear()
    yield
    root.cache_clear()


SAVED = OutputUse(saved=True)


@torch.no_grad()
def one_device(backend, x, cu, S0, do, dS):
    """What `linear.one_device` asks for, forward and backward."""
    out = backend(x.rule, x.inputs, cu, 0.3, SAVED).output(S0)
    grads, dS0 = backend(x.rule, x.inputs, cu, 0.3).gradients(Backward(S0, do, out.saved), dS)
    return [out.o, out.leaving, *grads, dS0]


@torch.no_grad()
def sharded(backend, x, cu, S0, do, dS):
    """What `linear.split` asks for; states arrive between the steps."""
    local = backend(x.rule, x.inputs, cu, 0.3, SAVED)
    summary = local.prepare(local.summary(S0, True))
    out = local.output(summary.leaving + 1, summary)
    local, backward = backend(x.rule, x.inputs, cu, 0.3), Backward(S0, do, out.saved)
    adjoint = local.prepare_gradients(backward, local.adjoint(backward, dS))
    grads, dS0 = local.gradients(backward, adjoint.entering.clone(), adjoint)
    return [summary.transition, summary.leaving, out.o, out.leaving, adjoint.entering, *grads, dS0]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b is None or torch.equal(a, b)


class Drawn:
    """A case with inputs of its own."""

    def __init__(self, rule: str, seed: int, **shape) -> None:
        torch.manual_seed(seed)
        case = Case(rule, **shape)
        self.rule = Rule.parse(rule)
        self.inputs = Inputs(*(None if x is None else x.requires_grad_() for x in case.inputs(DEVICE)))
        self.cu = None if case.cu is None else torch.tensor(case.cu, device=DEVICE)
        states = case.B, len(case.cu or (0, 0)) - 1, case.H, case.K, case.V
        self.states = [torch.randn(states, device=DEVICE) for _ in range(2)]
        self.do = torch.randn_like(self.inputs.v)

    def run(self, way, backend):
        return way(backend, self, self.cu, self.states[0].clone(), self.do, self.states[1].clone())


WAYS = [
    *[(rule, "dense", sharded) for rule in RULES],
    *[(rule, "packed", one_device) for rule in ("additive_scalar", "delta_diagonal")],
]


@pytest.mark.parametrize(("rule", "shape", "way"), WAYS)
def test_replayed_is_the_same(rule: str, shape: str, way) -> None:
    played = []
    for seed in range(3):
        x = Drawn(rule, seed, **CASES[shape])
        got = x.run(way, Watched)
        played.append(Watched.took())
    assert played == [0, 0, 2 if way is one_device else 5]
    for a, b in zip(x.run(way, recurrence), got, strict=True):
        assert same(a, b)


def test_descriptors_are_made_again(monkeypatch) -> None:
    """Tensors that go by descriptor are other ones the next time."""
    monkeypatch.setattr(table, "DESCRIBED", 0)
    for seed in range(3):
        x = Drawn("additive_scalar", seed, T=40, H=1, K=64, V=64)
        got = x.run(one_device, Watched)
    assert Watched.took() == 2
    for a, b in zip(x.run(one_device, recurrence), got, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_kept_looks_the_same_replayed(rule: str) -> None:
    """A block that is computed again in backward must save what it saved at first, replayed or not."""
    looks = []
    for seed in range(3):
        x = Drawn(rule, seed, **CASES["dense"])
        with torch.no_grad():
            saved = Watched(x.rule, x.inputs, x.cu, 0.3, SAVED).output(x.states[0]).saved
        looks.append([None if t is None else (t.shape, t.dtype) for t in saved])
    assert Watched.took() == 1
    assert looks[0] == looks[1] == looks[2]


class Watched(Replay):
    """Counts the steps that were replayed."""

    calls: list[Replay] = []

    def __init__(self, *args, **keywords) -> None:
        super().__init__(*args, **keywords)
        self.calls.append(self)

    @classmethod
    def took(cls) -> int:
        n = sum(len(x._steps) for x in cls.calls if x._real is None)
        cls.calls.clear()
        return n


def test_a_tensor_brought_twice() -> None:
    """q and k may be one tensor, and need not be the next time."""
    for seed, one in enumerate([True, True, True, False, False, False]):
        x = Drawn("additive_scalar", seed, **CASES["dense"])
        if one:
            x.inputs = x.inputs._replace(k=x.inputs.q)
        for a, b in zip(x.run(one_device, recurrence), x.run(one_device, Replay)):
            assert same(a, b)


@torch.no_grad()
@pytest.mark.parametrize("shape", CASES)
def test_one_decay_for_all_tokens(shape: str) -> None:
    """A gate expanded over the tokens is not copied for each; its gradient is each token's."""
    for seed in range(3):
        x = Drawn("additive_scalar", seed, **CASES[shape])
        x.inputs = x.inputs._replace(g=x.inputs.g[0, 0].expand_as(x.inputs.g))
        got = x.run(one_device, Replay)
    for a, b in zip(x.run(one_device, recurrence), got, strict=True):
        assert same(a, b)


@torch.no_grad()
def test_leaving_the_known_path() -> None:
    """A call whose first steps are replayed and whose next is new does the first again, and is known from then on."""
    for seed in range(3):
        Drawn("delta_scalar", seed, **CASES["dense"]).run(sharded, Replay)
    for seed in range(3):
        x = Drawn("delta_scalar", seed, **CASES["dense"])
        outs = []
        for backend, use in ((recurrence, SAVED), (Replay, OutputUse()), (Replay, SAVED)):
            local = backend(x.rule, x.inputs, None, 0.3, use)
            outs.append(local.output(None, local.summary(x.states[0].clone(), True)))
        want, *got = outs
        assert all(torch.equal(want.o, out.o) and torch.equal(want.leaving, out.leaving) for out in got)
        assert all(map(same, want.saved, got[1].saved))
        assert len(want.saved) == len(got[1].saved)


@torch.no_grad()
def test_states_changed_in_place_and_strided_inputs() -> None:
    """What needs a copy is copied again when it has changed."""
    for seed in range(4):
        x = Drawn("additive_diagonal", seed, **CASES["dense"])
        x.inputs = x.inputs._replace(q=x.inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
        outs = []
        for backend in (recurrence, Replay):
            S0 = x.states[0].double()
            local = backend(x.rule, x.inputs, None, 0.3)
            summary = local.summary(S0, True)
            S0 += 1
            out = local.output(S0, summary)
            outs.append([summary.transition, summary.leaving, out.o, out.leaving])
        assert all(torch.equal(a, b) for a, b in zip(*outs))


def test_parts_needed_at_once_do_not_overlap() -> None:
    parts = [(512, 0, 3), (256, 1, 2), (512, 3, 5), (1024, 2, 4), (256, 4, 9)]
    offsets, size = layout(parts)
    for i, (a, born, died) in enumerate(parts):
        for j, (b, *life) in enumerate(parts[:i]):
            apart = offsets[i] + a <= offsets[j] or offsets[j] + b <= offsets[i]
            together = born < life[1] and life[0] < died
            assert apart or not together
    assert size < sum(part[0] for part in parts)


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    """What is replayed is launched where its tensors are."""
    for seed in range(4):
        x = Drawn("delta_scalar", seed, **CASES["dense"])
        elsewhere = Inputs(*(None if t is None else t.to("cuda:1") for t in x.inputs))
        o = Replay(x.rule, elsewhere, None, 0.3).output(None).o
        assert torch.equal(o.to("cuda:0"), recurrence(x.rule, x.inputs, None, 0.3).output(None).o)
