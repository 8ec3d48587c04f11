"""The kernels of gates against PyTorch's own operations and their autograd: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.gate_cases import (
    CASES,
    DEVICE,
    ahead_case,
    beside_case,
    decay_case,
    draw,
    rms_case,
    skip_case,
    softmax_case,
    step_case,
    steps_case,
    swiglu_case,
    unit_case,
)
from tests.support.interpreter import interpreted
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import ahead_kernel as triton_ahead  # noqa: E402
from ring_la.kernels.fused import discretise_kernel as triton_discretise  # noqa: E402
from ring_la.kernels.fused import log_decay_kernel as decay  # noqa: E402
from ring_la.kernels.fused import rms_norm_kernel as triton_rms  # noqa: E402
from ring_la.kernels.fused import skip_kernel as triton_skip  # noqa: E402
from ring_la.kernels.fused import swiglu_kernel as triton_swiglu  # noqa: E402
from ring_la.kernels.fused import unit_length_kernel as norm  # noqa: E402
from ring_la.kernels.fused import wide_softmax_kernel as triton_softmax  # noqa: E402
from ring_la.kernels.runtime.replayed_function import record_of  # noqa: E402


@pytest.mark.parametrize("D", [5, 700])
def test_swiglu(D: int) -> None:
    true, got, _ = swiglu_case(D)
    assert [g.shape for g in got] == [t.shape for t in true]
    assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_skip(whole: bool) -> None:
    true, got, _ = skip_case(20, whole)
    assert [g.shape for g in got] == [t.shape for t in true]
    assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize(("bias", "softplus", "run"), [(True, True, 128), (False, False, 128), (True, False, 6)])
def test_discretise(bias: bool, softplus: bool, run: int, monkeypatch) -> None:
    monkeypatch.setattr(triton_discretise, "RUN", run)
    true, *both = step_case(20, bias, softplus)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert len({g.untyped_storage().data_ptr() for g in got}) == len(got)  # an operator's results share no memory
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize(("H", "bias", "skip", "softplus"), [(20, True, True, True), (3, False, False, False)])
def test_steps(H: int, bias: bool, skip: bool, softplus: bool) -> None:
    """More heads than a tile and fewer, rows apart in memory, more tokens than are summed at a time."""
    true, got, _ = steps_case(H, bias, skip, softplus)
    assert [g.shape for g in got] == [t.shape for t in true]
    assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


def test_a_skip_comes_back_with_the_step() -> None:
    true, *both = beside_case(20)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("K", [5, 64])
def test_ahead_of_a_decay(K: int) -> None:
    true, *both = ahead_case(K)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


def test_ahead_of_a_decay_one_gradient_may_be_missing() -> None:
    """As the other were zero; and what is not finite stays so."""
    p, g, da, dg = draw(1, 9, 3, 20), -draw(1, 9, 3).abs(), draw(1, 9, 3, 20), draw(1, 9, 3)
    for given in ((da, None), (None, dg)):
        zeros = [torch.zeros_like(t) if x is None else x for x, t in zip(given, (p, g))]
        for got, want in zip(
            triton_ahead.backward(*given, p, g, -1.0), triton_ahead.backward(*zeros, p, g, -1.0), strict=True
        ):
            torch.testing.assert_close(got, want)
    g[0, 3, 1] = float("nan")
    a, kept = triton_ahead.forward(p, g, -1.0)
    assert a[0, 3, 1].isnan().all()
    assert int(kept.isnan().sum()) == 1


@pytest.mark.parametrize("gate", [None, "silu", "sigmoid"])
def test_rms_norm(gate: str | None) -> None:
    true, *both = rms_case(40, gate, rows=70)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_log_decay(name: str) -> None:
    true, *both = decay_case(name)
    for got in both:
        assert [g.shape for g in got] == [t.shape for t in true]
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("D", [5, 64])
def test_unit_length(D: int) -> None:
    true, *both = unit_case(D)
    for got in both:
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


@pytest.mark.parametrize("D", [1, 5, 64])
def test_wide_softmax(D: int) -> None:
    true, *both = softmax_case(D)
    for got in both:
        assert all(error(g, t) < 1e-5 for g, t in zip(got, true, strict=True))


def test_a_wide_softmax_of_large_scores_is_finite_and_of_nan_is_nan() -> None:
    x = torch.tensor([[1e30, -1e30, 0.0], [3e38, 3e38, -3e38], [0.0, float("nan"), 1.0]], device=DEVICE)
    got = triton_softmax.forward(x)
    torch.testing.assert_close(got, x.softmax(-1), equal_nan=True)


def test_small_decays_keep_their_digits() -> None:
    a = torch.linspace(-30, 30, 61, device=DEVICE)[None, None]
    got = decay.forward(a, None, None, 1.0, 1.0, False)
    true = -torch.log1p(a.double().exp())
    assert ((got - true) / true).abs().max() < 5e-6


def calls() -> dict[str, tuple]:
    """Every function that is replayed, and arguments for it."""
    torch.manual_seed(0)
    x, dy, gate = (draw(2, 9, 3, 20) for _ in range(3))
    a, dt, dg, A, bias, D, weight = (
        draw(2, 9, 24)[..., :20],
        draw(2, 9, 3),
        draw(2, 9, 3),
        *(draw(3) for _ in range(3)),
        draw(20),
    )
    wide = draw(2, 9, 80)[..., :60].unflatten(2, (3, 20))
    return {
        "unit": (norm.forward, x, 1e-6),
        "unit's gradient": (norm.backward, dy, wide, 1e-6),
        "decay": (decay.forward, a, None, weight, 1.0, 1.0, False),
        "decay's gradient": (decay.backward, draw(2, 9, 20), a, draw(4), weight, 1.0, 1.0, False),
        "rms": (triton_rms.forward, x, weight, gate, True, 1e-5),
        "rms' gradient": (triton_rms.backward, dy, x, weight, None, True, 1e-5),
        "step": (triton_discretise.forward, wide, dt, A, bias, True),
        "step's gradient": (triton_discretise.backward, dy, dg, x, dt, A, None, True),
        "ahead": (triton_ahead.forward, wide, dg, -1.0),
        "ahead's gradient": (triton_ahead.backward, dy, None, wide, dg, -1.0),
        "skip": (triton_skip.forward, x, wide, D),
        "skip's gradient": (triton_skip.backward, dy, wide, D),
        "softmax": (triton_softmax.forward, x),
        "softmax' gradient": (triton_softmax.backward, dy, wide),
        "swiglu": (triton_swiglu.forward, x),
        "swiglu's gradient": (triton_swiglu.backward, draw(2, 9, 3, 10), x),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_replayed_calls_return_the_same_bits(name: str) -> None:
    """The second call is written down and the third replayed: what the first returned, to the bit, in tensors of their
    own."""
    function, *arguments = calls()[name]
    record_of.cache_clear()
    want = function(*arguments)
    for _ in range(3):
        got = function(*arguments)
        assert type(got) is type(want)
        pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple) else [(got, want)]
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
        ours = [a.untyped_storage().data_ptr() for a, _ in pairs if a is not None]
        assert len(set(ours)) == len(ours)
        assert not {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, Tensor)} & set(ours)
