"""Gates, norms and their like: the truth, what the kernels compute and what PyTorch's operations compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ring_la.kernels.fused import ahead, discretise, log_decay, skip, steps, swiglu, unit_length, wide_softmax
from ring_la.kernels.fused import rms_norm as rms
from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.fused import ahead_kernel as triton_ahead  # noqa: E402
from ring_la.kernels.fused import discretise_kernel as triton_discretise  # noqa: E402
from ring_la.kernels.fused import log_decay_kernel as decay  # noqa: E402
from ring_la.kernels.fused import rms_norm_kernel as triton_rms  # noqa: E402
from ring_la.kernels.fused import skip_kernel as triton_skip  # noqa: E402
from ring_la.kernels.fused import swiglu_kernel as triton_swiglu  # noqa: E402
from ring_la.kernels.fused import unit_length_kernel as norm  # noqa: E402
from ring_la.kernels.fused import wide_softmax_kernel as triton_softmax  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # tokens [B, T], channels, heads of A_log, whether there is a bias, sign, factor, whether it is bounded
    "a head": (2, 50, 8, 8, True, 1.0, 1.0, False),
    "a channel": (1, 40, 48, 4, True, 1.0, 1.0, False),
    "logsigmoid": (2, 33, 20, None, False, -1.0, 0.0625, False),
    "bounded": (1, 40, 48, 4, True, 1.0, 5.0, True),
    "bounded, of a head": (2, 33, 20, None, False, 1.0, 5.0, True),
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def of_autograd(function, tensors: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """The result in fp64, and the gradients of the tensors that are there."""
    wide = [None if t is None else t.double().requires_grad_() for t in tensors]
    out = function(*wide)
    return [out.detach(), *torch.autograd.grad(out, [t for t in wide if t is not None], grad.double())]


def decay_case(name: str, dtype: torch.dtype = torch.float32, times: int = 1) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): g and the gradients."""
    torch.manual_seed(0)
    B, T, C, heads, biased, *form = CASES[name]
    a = draw(B, T * times, C + 3, dtype=dtype, scale=4.0)[..., :C]
    A_log, bias = None if heads is None else draw(heads), draw(C) - 3 if biased else None
    dg = draw(B, T * times, C)
    true = of_autograd(lambda *x: log_decay.plain_log_decay(*x, *form), [a, A_log, bias], dg)

    def results(forward, backward) -> list[Tensor]:
        return [g for g in (forward(a, A_log, bias, *form), *backward(dg, a, A_log, bias, *form)) if g is not None]

    ours = results(decay.forward, decay.backward)
    return true, ours, results(log_decay.plain_log_decay, log_decay.plain_log_decay_backward)


def unit_case(D: int, dtype: torch.dtype = torch.float32, T: int = 9) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): y and dx."""
    torch.manual_seed(0)
    x = draw(2, T, 3 * D + 8, dtype=dtype)[..., : 3 * D].unflatten(2, (3, D))
    dy = draw(2, T, 3, D, dtype=dtype)
    true = of_autograd(lambda y: unit_length.plain_unit_length(y, 1e-6), [x], dy)
    plain = [unit_length.plain_unit_length(x, 1e-6), unit_length.plain_unit_length_backward(dy, x, 1e-6)]
    return true, [norm.forward(x, 1e-6), norm.backward(dy, x, 1e-6)], plain


def rms_case(
    D: int, gate: str | None, dtype: torch.dtype = torch.float32, rows: int = 9
) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): o and the gradients of x, weight and gate."""
    torch.manual_seed(0)
    x, weight, do = draw(2, rows, D, dtype=dtype), draw(D), draw(2, rows, D, dtype=dtype)
    z = None if gate is None else draw(2, rows, D, dtype=dtype)
    form = (gate == "silu", 1e-5)
    true = of_autograd(lambda *t: rms.plain_rms_norm(*t, *form), [x, weight, z], do)

    def results(forward, backward) -> list[Tensor]:
        grads = backward(do, x, weight, z, *form)
        return [t for t in (forward(x, weight, z, *form), *grads) if t is not None]

    ours = results(triton_rms.forward, triton_rms.backward)
    return true, ours, results(rms.plain_rms_norm, rms.plain_rms_norm_backward)


def step_case(
    V: int, bias: bool, softplus: bool, dtype: torch.dtype = torch.float32, T: int = 9
) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): v, g and the gradients of x, dt, A and bias."""
    torch.manual_seed(0)
    x, dv = draw(2, T, 3, V + 4, dtype=dtype)[..., :V], draw(2, T, 3, V, dtype=dtype)
    dt, dg, A = draw(2, T, 3, dtype=dtype), draw(2, T, 3), -draw(3).abs()
    inputs = [x, dt, A, draw(3) if bias else None]
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    out = discretise.plain_discretise(*leaves, softplus)
    grads = torch.autograd.grad(out, [t for t in leaves if t is not None], [dv.double(), dg.double()])

    def results(forward, backward) -> list[Tensor]:
        found = (*forward(*inputs, softplus), *backward(dv, dg, *inputs, softplus))
        return [t for t in found if t is not None]

    ours = results(triton_discretise.forward, triton_discretise.backward)
    return [*out, *grads], ours, results(discretise.plain_discretise, discretise.plain_discretise_backward)


def ahead_case(K: int, dtype: torch.dtype = torch.float32, T: int = 9) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): p e^−g, g from −2 on, and the gradients of p and g, which some are below."""
    torch.manual_seed(0)
    p, da = draw(2, T, 3 * K + 4, dtype=dtype)[..., : 3 * K].unflatten(2, (3, K)), draw(2, T, 3, K, dtype=dtype)
    g, dg, least = -draw(2, T, 3, scale=2.0).abs(), draw(2, T, 3), -2.0
    leaves = [t.double().requires_grad_() for t in (p, g)]
    out = ahead.plain_ahead(*leaves, least)
    grads = torch.autograd.grad(out, leaves, [da.double(), dg.double()])

    def results(forward, backward) -> list[Tensor]:
        return [*forward(p, g, least), *backward(da, dg, p, g, least)]

    ours = results(triton_ahead.forward, triton_ahead.backward)
    return [*out, *grads], ours, results(ahead.plain_ahead, ahead.plain_ahead_backward)


def beside_case(V: int, dtype: torch.dtype = torch.float32, T: int = 9) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): of 2 Δ x + D x and Δ A, and the gradients of x, dt, A, bias and D."""
    torch.manual_seed(0)
    x, do = draw(2, T, 3, V + 4, dtype=dtype)[..., :V], draw(2, T, 3, V, dtype=dtype)
    inputs = [x, draw(2, T, 3, dtype=dtype), -draw(3).abs(), draw(3), draw(3)]
    dg = draw(2, T, 3)

    def by(what: Callable, wide: torch.dtype | None = None) -> list[Tensor]:
        leaves = [t.detach().to(wide or t.dtype).requires_grad_() for t in inputs]
        v, g, readout = what(*leaves, softplus=True)
        out = (readout(v + v), g)
        return [*out, *torch.autograd.grad(out, leaves, [do.to(out[0].dtype), dg.to(out[1].dtype)])]

    def plain(x, dt, A, bias, D, softplus):
        return *discretise.plain_discretise(x, dt, A, bias, softplus), lambda y: skip.plain_skip(y, x, D)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discretise, "kernels_of", lambda step, *tensors: True)
        ours = by(discretise.discretise_and_skip)
    return by(plain, torch.float64), ours, by(plain)


def steps_case(
    H: int, bias: bool, skip: bool, softplus: bool, dtype: torch.dtype = torch.float32, T: int = 150
) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): Δ, Δ A, D by token and the gradients of dt, A, bias and D."""
    torch.manual_seed(0)
    inputs = [draw(2, T, H + 3, dtype=dtype)[..., :H], -draw(H).abs(), draw(H) if bias else None]
    inputs.append(draw(H) if skip else None)
    do = [draw(2, T, H) for _ in range(3 if skip else 2)]

    def by(kernels: bool, wide: torch.dtype | None = None) -> list[Tensor]:
        leaves = [None if t is None else t.detach().to(wide or t.dtype).requires_grad_() for t in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "kernels_of", lambda step, *tensors: kernels or None)
            out = [t for t in steps.steps(*leaves, softplus=softplus) if t is not None]
        grads = torch.autograd.grad(out, [t for t in leaves if t is not None], [t.to(out[0].dtype) for t in do])
        return [*out, *grads]

    return by(False, torch.float64), by(True), by(False)


def skip_case(V: int, whole: bool, dtype: torch.dtype = torch.float32, T: int = 300) -> tuple[list, list, list]:
    """(true, by the kernels, by PyTorch): o and the gradients of x and D, which is `whole` or one value a head."""
    torch.manual_seed(0)
    y, do, D = draw(2, T, 3, V, dtype=dtype), draw(2, T, 3, V, dtype=dtype), draw(3, V) if whole else draw(3)
    x = draw(2, T, 3 * V + 4, dtype=dtype)[..., : 3 * V].unflatten(2, (3, V))

    def by_autograd(y: Tensor, x: Tensor, D: Tensor, do: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), D.detach().requires_grad_()]
        o = skip.plain_skip(y, *leaves)
        return [o, *torch.autograd.grad(o, leaves, do)]

    ours = [triton_skip.forward(y, x, D), *triton_skip.backward(do, x, D)]
    return by_autograd(*(t.double() for t in (y, x, D, do))), ours, by_autograd(y, x, D, do)


def swiglu_case(D: int, dtype: torch.dtype = torch.float32, rows: int = 9) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): o and the gradient of y."""
    torch.manual_seed(0)
    y, do = draw(2, rows, 2 * D, dtype=dtype, scale=3.0), draw(2, rows, D, dtype=dtype)

    def by_autograd(y: Tensor, do: Tensor) -> list[Tensor]:
        leaf = y.detach().requires_grad_()
        o = swiglu.plain_swiglu(leaf)
        return [o, *torch.autograd.grad(o, leaf, do)]

    ours = [triton_swiglu.forward(y), triton_swiglu.backward(do, y)]
    return by_autograd(y.double(), do.double()), ours, by_autograd(y, do)


def softmax_case(D: int, dtype: torch.dtype = torch.float32, rows: int = 9) -> tuple[list[Tensor], list, list]:
    """(true, by the kernels, by PyTorch): the softmax and the gradient of x."""
    torch.manual_seed(0)
    x, dw = draw(2, rows, 3, D, dtype=dtype, scale=3.0), draw(2, rows, 3, D)
    true = of_autograd(wide_softmax.plain_wide_softmax, [x], dw)
    plain = [wide_softmax.plain_wide_softmax(x), wide_softmax.plain_wide_softmax_backward(dw, x)]
    return true, [triton_softmax.forward(x), triton_softmax.backward(dw, x)], plain
