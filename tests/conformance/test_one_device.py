"""One device: modes, packing, chunks of any length, splitting anywhere, values that leave a dtype's range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.kernels.pytorch.chunked import CanonicalChunks, ChunkedRecurrence
from ring_la.linear import one_device
from ring_la.recurrences import RECURRENCES as DEFINITIONS
from tests.conformance.calls import H, K, V, run
from tests.support.recurrence_cases import RECURRENCES, error, make_inputs


@pytest.mark.parametrize("mode", ["chunk", "recurrent", "auto"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_every_mode_packed_or_not_is_the_reference(name, mode):
    for T, cu in ((70, None), (1, None), (70, (0, 0, 1, 40, 70, 70))):
        B = 2 if cu is None else 1
        N = B if cu is None else len(cu) - 1
        x = make_inputs(name, B, T, H=H, K=K, V=V)
        draws = [torch.randn(*s, dtype=torch.float64) for s in ((N, H, K, V), (B, T, H, V), (N, H, K, V))]
        state = draws[0].requires_grad_()
        keywords = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
        got = run(getattr(ring_la, name), x, state, draws[1:], mode=mode, **keywords)
        want = run(getattr(reference, name), x, state, draws[1:], **keywords)
        assert max(map(error, got, want)) < 1e-10


@pytest.mark.parametrize("name", RECURRENCES)
def test_scale_l2norm_and_backends_are_the_reference(name):
    """Scale, L2-normalised q and k, the reference backend, and no state at all."""
    x = make_inputs(name, 2, 33, H=H, K=K, V=V)
    for keywords in (dict(scale=0.3), dict(use_qk_l2norm=True), dict(backend="torch"), dict(backend="reference")):
        got = getattr(ring_la, name)(**x, **keywords)
        want = getattr(reference, name)(**x, **{k: v for k, v in keywords.items() if k != "backend"})
        assert error(got.o, want.o) < 1e-10
        assert got.final_state is None


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_bidirectional_and_normalised_linear_attention_is_the_reference(causal, normalize):
    for cu in (None, torch.tensor([0, 9, 9, 40])):
        x = make_inputs("linear_attention", 1, 40, H=H, K=K, V=V)
        x = {n: t.detach().abs().requires_grad_() for n, t in x.items()}
        N = 1 if cu is None else 3
        state = torch.rand(N, H, K, V + normalize, dtype=torch.float64, requires_grad=True)
        cotangents = torch.randn(1, 40, H, V, dtype=torch.float64), torch.randn(*state.shape, dtype=torch.float64)
        flags = dict(causal=causal, normalize=normalize, cu_seqlens=cu)
        got = run(ring_la.linear_attention, x, state, cotangents, **flags)
        want = run(reference.linear_attention, x, state, cotangents, **flags)
        assert max(map(error, got, want)) < 1e-10


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(RECURRENCES),
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
    st.integers(1, 40),
    st.integers(0, 10**6),
)
def test_any_packing_any_chunk_length(name, lengths, size, seed):
    """Documents of any lengths, empty ones too, in chunks of any length, equal the token loop."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = make_inputs(name, 1, sum(lengths), H=H, K=K, V=V, seed=seed)
    want = getattr(reference, name)(**x, cu_seqlens=cu, output_final_state=True)
    seen = {}

    def spy(rule, inputs, offsets, scale, *others):
        local = ChunkedRecurrence(rule, inputs, offsets, scale, CanonicalChunks(size))
        seen["count"] = local.chunks.count
        return local

    original, one_device.make_local = one_device.make_local, spy
    try:
        got = getattr(ring_la, name)(**x, cu_seqlens=cu, output_final_state=True)
    finally:
        one_device.make_local = original
    assert seen["count"] >= sum(-(-n // size) for n in lengths)
    assert error(got.o, want.o) < 1e-10
    assert error(got.final_state, want.final_state) < 1e-10


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(RECURRENCES), st.integers(2, 80), st.data())
def test_handing_the_state_over_anywhere(name, T, data):
    """Cutting a sequence at any token and passing the final state on equals the whole."""
    cut = data.draw(st.integers(1, T - 1))
    x = make_inputs(name, 2, T, H=H, K=K, V=V)
    f = getattr(ring_la, name)
    static = {n for n, t in x.items() if not isinstance(t, Tensor) or t.dim() == 1}
    parts = [{n: t if n in static else t[:, s] for n, t in x.items()} for s in (slice(0, cut), slice(cut, None))]
    first = f(**parts[0], output_final_state=True)
    second = f(**parts[1], initial_state=first.final_state, output_final_state=True)
    whole = f(**x, output_final_state=True)
    assert error(torch.cat([first.o, second.o], 1), whole.o) < 1e-10
    assert error(second.final_state, whole.final_state) < 1e-10


def test_strong_decay_stays_finite():
    """Decays far below fp32's range within one chunk: no overflow, no NaN, right gradients."""
    for name in ("simple_gla", "gla", "gated_delta_rule", "kda", "dplr_delta_rule"):
        x = make_inputs(name, 1, 100, H=H, K=K, V=V, dtype=torch.float32)
        x["g"] = (x["g"].detach() * 60).requires_grad_()
        state = torch.randn(1, H, K, V, requires_grad=True)
        cotangents = torch.randn(1, 100, H, V), torch.randn(1, H, K, V)
        got = run(getattr(ring_la, name), x, state, cotangents)
        want = run(getattr(reference, name), x, state, cotangents)
        assert max(map(error, got, want)) < 2e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_comba_where_a_decay_leaves_nothing(dtype):
    """Finite and the token loop's, though e^−g is in no range."""
    x = {n: t.detach() for n, t in make_inputs("comba", 1, 40).items()}
    x["g"] = torch.where(torch.arange(40)[None, :, None] % 7 == 3, -200.0, x["g"])
    x["p"] = x["k"].repeat_interleave(x["p"].shape[2] // x["k"].shape[2], 2) / 2
    x = {n: t.to(dtype) if n in "qkvp" else t.float() for n, t in x.items()}
    want = reference.comba(**{n: t.double() for n, t in x.items()}).o
    got = ring_la.comba(**x).o.double()
    assert float((got - want).norm() / want.norm()) < {torch.float32: 1e-5}.get(dtype, 2e-2)


def test_inference_mode_changes_nothing():
    """Also where the PyTorch backend differentiates to compute a result."""
    for r in DEFINITIONS:
        x = make_inputs(r.name, 1, 9)
        want = getattr(ring_la, r.name)(**x, cu_seqlens=torch.tensor([0, 4, 9])).o
        with torch.inference_mode():
            y = {n: t.clone() if isinstance(t, Tensor) else t for n, t in x.items()}
            got = getattr(ring_la, r.name)(**y, cu_seqlens=torch.tensor([0, 4, 9])).o
        assert torch.equal(got, want), r.name
