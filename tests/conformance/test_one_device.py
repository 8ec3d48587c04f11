"""One device: modes, packing, splitting anywhere, registration, and refusals."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.algebra import Rule
from ring_la.define import KEY, QUERY, RATE, VALUE, Argument
from ring_la.kernels import Inputs
from ring_la.kernels.operators import linear_recurrence, linear_recurrence_backward
from ring_la.kernels.pytorch.chunked import CanonicalChunks, ChunkedRecurrence
from ring_la.linear import one_device
from ring_la.recurrences import RECURRENCES as DEFINITIONS
from ring_la.recurrences.definition import Recurrence
from ring_la.recurrences.recurrence import recurrence
from ring_la.testing import check_recurrence
from tests.support.recurrence_cases import COMPOSED, RECURRENCES, error, make_inputs

H, K, V = 4, 6, 5


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


def run(function, x: dict, state: Tensor, cotangents, **keywords):
    """Output, final state and gradients of the tensors of `x` and of the state."""
    leaves = [t for t in x.values() if isinstance(t, Tensor)]
    out = function(**x, initial_state=state, output_final_state=True, **keywords)
    do, dfinal = cotangents
    grads = torch.autograd.grad((out.o * do).sum() + (out.final_state * dfinal).sum(), [*leaves, state])
    return [out.o, out.final_state, *grads]


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


@pytest.mark.parametrize(("write", "decay"), [("delta", "rows"), ("deltas", "scalar"), ("additive", "")])
def test_rules_are_checked_where_they_are_made(write, decay):
    wrong = "decay" if write in ("additive", "delta") else "write"
    with pytest.raises(ring_la.ArgumentError, match=f"{wrong}: expected one of"):
        Rule(write, decay)
    with pytest.raises(ring_la.ArgumentError, match=f"{wrong}: expected one of"):
        Rule.parse(f"{write}_{decay}")


def test_no_gate_no_gradient():
    x = make_inputs("simple_gla", 1, 9)
    g = x.pop("g")
    out = ring_la.simple_gla(**x, g=None)
    assert torch.autograd.grad(out.o.sum(), [*x.values(), g], allow_unused=True)[-1] is None


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


@pytest.mark.parametrize(
    "name", ["linear_attention", "simple_gla", "gla", "gated_delta_rule", "kda", "dplr_delta_rule"]
)
def test_gradients_are_finite_differences(name):
    x = make_inputs(name, 1, 5, Hk=1, H=2, K=3, V=2)
    state = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    names = list(x)

    def f(state, *tensors):
        out = getattr(ring_la, name)(
            **dict(zip(names, tensors)), initial_state=state, output_final_state=True, mode="chunk"
        )
        return out.o, out.final_state

    assert torch.autograd.gradcheck(f, (state, *x.values()))


def test_second_derivative_is_refused():
    x = make_inputs("gated_delta_rule", 1, 9)
    out = ring_la.gated_delta_rule(**x)
    (grad,) = torch.autograd.grad(out.o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(ring_la.SecondDerivativeError, match="second derivative"):
        grad.sum().backward()


def test_transforms_of_functions_are_refused():
    """PyTorch would drop a tangent at an operator and return zeros, and end torch.func.grad in an error of its own."""
    x, y, w = (torch.randn(*s, dtype=torch.float64) for s in ((1, 9, 2, 4), (9, 4), (8, 3)))
    for function, name in (
        (lambda q: ring_la.gla(q, x, x, -x.abs()).o, "q"),
        (lambda dt: ring_la.mamba2(x, dt, -y[0, :2].abs(), x, x).o, "dt"),
        (lambda k: ring_la.attention(x, k, x).o, "k"),
        (lambda v: ring_la.short_conv(v, w).o, "x"),
        (lambda v: ring_la.token_shift(v).o, "x"),
        (lambda a: ring_la.grouped_gemm(a[0, :, 0], y[:1, :, None], torch.tensor([9])), "a"),
    ):
        at = x[..., 0].contiguous() if name == "dt" else x
        with pytest.raises(ring_la.UnsupportedError, match=f"^{name}: expected no tangent"):
            torch.func.jvp(function, (at,), (torch.ones_like(at),))
        for transformed in (
            torch.func.grad(lambda x, f=function: f(x).sum()),
            torch.func.vmap(torch.func.grad(lambda x, f=function: f(x[None]).sum())),
            torch.func.grad(lambda x, f=function: torch.func.vmap(f)(x[None]).sum()),
        ):
            with pytest.raises(ring_la.UnsupportedError, match=f"^{name}: expected no gradient within"):
                transformed(at)
    by_reference = lambda q: ring_la.gla(q, x, x, -x.abs(), backend="reference").o  # noqa: E731
    (tangent,) = torch.func.jvp(by_reference, (x,), (x,))[1:]
    assert tangent.abs().sum() > 0
    assert torch.func.grad(lambda q: by_reference(q).sum())(x).abs().sum() > 0


def test_vmap_is_a_loop():
    x = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64)
    for function in (lambda q: ring_la.gla(q, q, q, -q.abs()).o, lambda q: ring_la.attention(q, q, q, softcap=2.0).o):
        torch.testing.assert_close(torch.vmap(function)(x), torch.stack([function(q) for q in x]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", ["additive_none", "additive_scalar", "delta_diagonal", "dplr_diagonal"])
def test_operators_have_right_schemas_and_fakes(rule, packed):
    name = {"additive_none": "linear_attention", "additive_scalar": "simple_gla", "delta_diagonal": "kda"}
    x = make_inputs(name.get(rule, "dplr_delta_rule"), 1, 20, dtype=torch.float32)
    tensors = [x.get(n) for n in Inputs._fields]
    cu = torch.tensor([0, 7, 20]) if packed else None
    S0 = torch.randn(1, 2 if packed else 1, 4, 6, 5, requires_grad=True)
    torch.library.opcheck(linear_recurrence, (*tensors, S0, cu, rule, 0.5, "chunk", None))
    plain = [None if t is None else t.detach() for t in tensors]
    do, dS = torch.randn(1, 20, 4, 5), torch.randn_like(S0)
    torch.library.opcheck(linear_recurrence_backward, (do, dS, *plain, S0.detach(), cu, rule, 0.5, None, True))


BAD = [
    (dict(k=torch.zeros(1, 8, 2, 5)), "k"),
    (dict(v=torch.zeros(1, 7, 4, 5)), "v"),
    (dict(v=torch.zeros(1, 8, 3, 5)), "v"),
    (dict(v=torch.zeros(8, 4, 5)), "v"),
    (dict(q=torch.zeros(1, 8, 2, 6, dtype=torch.int64)), "q"),
    (dict(q="q"), "q"),
    (dict(q=None), "q"),
    (dict(k=None), "k"),
    (dict(g=None), "g"),
    (dict(beta=None), "beta"),
    (dict(k=torch.zeros(1, 8, 2, 6, dtype=torch.float16)), "k"),
    (dict(g=torch.zeros(1, 8, 4, 6)), "g"),
    (dict(beta=torch.zeros(1, 8, 3)), "beta"),
    (dict(beta=torch.zeros(1, 8, 4, device="meta")), "beta"),
    (dict(initial_state=torch.zeros(2, 4, 6, 5)), "initial_state"),
    (dict(initial_state=torch.zeros(1, 4, 6, 5, dtype=torch.int32)), "initial_state"),
    (dict(cu_seqlens=torch.tensor([1, 8])), "cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 5, 4, 8])), "cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens"),
    (dict(cu_seqlens=[0, 8]), "cu_seqlens"),
    (dict(mode="fast"), "mode"),
    (dict(backend="cuda"), "backend"),
    (dict(backend="triton"), "backend"),
    (dict(scale="1"), "scale"),
    (dict(scale=float("nan")), "scale"),
    (dict(scale=True), "scale"),
    (dict(use_qk_l2norm="no"), "use_qk_l2norm"),
    (dict(output_final_state=None), "output_final_state"),
    (dict(in_place="no"), "in_place"),
    (dict(layout="zigzag"), "layout"),
]


@pytest.mark.parametrize(("change", "name"), BAD)
def test_bad_arguments_are_named(change, name):
    x = {n: t.detach().float() for n, t in make_inputs("gated_delta_rule", 1, 8).items()}
    for backend in ("torch", "reference"):
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
            ring_la.gated_delta_rule(**({"backend": backend} | x | change))


BAD_OF_THEIR_OWN = [
    ("linear_attention", dict(causal=None), "causal"),
    ("linear_attention", dict(normalize="no"), "normalize"),
    ("lightning_attention", dict(g=None, layer_idx=0.5), "layer_idx"),
    ("lightning_attention", dict(layer_idx=1, num_layers=2), "layer_idx"),
    ("retention", dict(g=torch.zeros(4, dtype=torch.int64)), "g"),
    ("hgrn2", dict(q=torch.zeros(1, 8, 2, 6, dtype=torch.bool)), "q"),
    ("mamba2", dict(dt_softplus="no"), "dt_softplus"),
    ("mamba2", dict(x=torch.zeros(1, 8, 4, 5).to(torch.float8_e5m2)), "x"),
    *(("mamba2", {n: torch.zeros(4, device="meta")}, n) for n in ("A", "D", "dt_bias")),
]


@pytest.mark.parametrize(("function", "change", "name"), BAD_OF_THEIR_OWN)
def test_bad_arguments_of_one_function_are_named(function, change, name):
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
        getattr(ring_la, function)(**(make_inputs(function, 1, 8) | change))


@pytest.mark.parametrize("function", [*RECURRENCES, *COMPOSED])
def test_sparse_tensors_and_no_heads_are_named(function):
    definition = getattr(ring_la, function).definition
    given = make_inputs(function, 1, 8)
    tensors = {n: t.detach() for n, t in given.items() if isinstance(t, Tensor)}
    getattr(ring_la, function)(**given)  # what is like a call that was checked is not checked again
    for name, t in tensors.items():
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+sparse"):
            getattr(ring_la, function)(**(given | {name: t.to_sparse()}))
    for name in (n for n, a in definition.arguments.items() if a.values and "H" in a.shape and n in tensors):
        none = tensors[name].narrow(definition.arguments[name].shape.index("H"), 0, 0)
        with pytest.raises(ring_la.ArgumentError, match=r"^\w+: expected .+, got .+"):
            getattr(ring_la, function)(**(given | {name: none}))


@pytest.mark.parametrize(
    ("change", "name"),
    [(dict(output_final_state=1), "output_final_state"), (dict(scale=True), "scale"), (dict(mode="fast"), "mode"),
     (dict(g=torch.zeros(1, 8, 6)), "g"), (dict(g=[0.0]), "g"), (dict(cu_seqlens=[0, 8]), "cu_seqlens"),
     (dict(initial_state=torch.zeros(2, 7)), "initial_state")],
)  # fmt: skip
def test_what_differs_from_a_checked_call_is_checked(change, name):
    x = make_inputs("hgrn", 1, 8) | dict(scale=1.0, output_final_state=True)
    ring_la.hgrn(**x)
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
        ring_la.hgrn(**(x | change))


def test_wrong_names_are_python_s_error():
    x = make_inputs("hgrn", 1, 8)
    for args, keywords in (((), {"x": x["x"]}), ((), x | {"y": 1}), ((x["x"], x["g"], 1), {}), ((x["x"],), x)):
        with pytest.raises(TypeError):
            ring_la.hgrn(*args, **keywords)


def test_unknown_keywords_are_not_swallowed():
    x = make_inputs("gla", 1, 8)
    with pytest.raises(TypeError, match="cu_seqlen"):
        ring_la.gla(**x, cu_seqlen=None)
    with pytest.raises(TypeError, match="beta"):
        ring_la.gla(**x, beta=x["q"])
    with pytest.raises(ring_la.ArgumentError, match=r"^cu_seqlens"):
        ring_la.gla(**make_inputs("gla", 2, 8), cu_seqlens=torch.tensor([0, 8]))


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
        "documents: expected names out of": lambda: check_recurrence(ring_la.gla, documents=("none",)),
        "function: expected one that": lambda: check_recurrence(sink),
    }.items():
        with pytest.raises(ring_la.ArgumentError, match=match):
            wrong()
