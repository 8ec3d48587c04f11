"""First derivatives are finite differences; what else PyTorch could ask of an operator is refused, or a loop."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.kernels import Inputs
from ring_la.kernels.operators import linear_recurrence, linear_recurrence_backward
from tests.support.recurrence_cases import make_inputs


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


def test_no_gate_no_gradient():
    x = make_inputs("simple_gla", 1, 9)
    g = x.pop("g")
    out = ring_la.simple_gla(**x, g=None)
    assert torch.autograd.grad(out.o.sum(), [*x.values(), g], allow_unused=True)[-1] is None


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
