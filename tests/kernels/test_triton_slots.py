"""Gated slot attention in bf16, in PyTorch and by kernels (interpreted without a GPU): within twice the error of an
independent loop of bf16 tensors and fp32 states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ring_la
from ring_la.algebra import Rule
from ring_la.kernels import choice
from ring_la.kernels.protocol import Backward, InputGradients, Inputs, OutputUse
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.triton_cases import error

interpreted()
compute_bf16()

from ring_la.kernels import families  # noqa: E402
from ring_la.kernels.replay import Replay  # noqa: E402

T, H, K, M = 128, 2, 64, 64


def _loop(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> Tensor:
    q, k, v, s, g = (x.float() for x in (q, k, v, s, g))
    keys, values, out = torch.zeros(1, H, K, M), torch.zeros(1, H, M, K), []
    for t in range(T):
        kept = g[:, t].exp()
        keys = keys * kept[..., None, :] + k[:, t, :, :, None] * s[:, t, :, None]
        values = values * kept[..., None] + s[:, t, :, :, None] * v[:, t, :, None]
        scores = K**-0.5 * torch.einsum("bhkm,bhk->bhm", keys, q[:, t])
        out.append(torch.einsum("bhmv,bhm->bhv", values, scores.softmax(-1)))
    return torch.stack(out, 1).bfloat16()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fla.py on GPUs")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bf16_errs_as_a_loop(monkeypatch, backend):
    if backend == "triton":
        monkeypatch.setattr(choice, "unsupported", lambda rule, x, recurrent=False: families.unsupported(rule, x))
    rng = torch.Generator().manual_seed(2)
    draw = lambda D: torch.randn(1, T, H, D, generator=rng)  # noqa: E731
    x = (normalize(draw(K), dim=-1), normalize(draw(K), dim=-1), draw(K), draw(M).sigmoid(), logsigmoid(draw(M) + 3))
    x, do = [t.bfloat16() for t in x], draw(K).bfloat16()

    def results(op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in x]
        o = op(*leaves)
        return [o, *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    true = results(lambda *x: ring_la.gated_slot_attention(*x, backend="torch").o, torch.float64)
    loop = results(_loop, torch.bfloat16)
    ours = results(lambda *x: ring_la.gated_slot_attention(*x, backend=backend).o, torch.bfloat16)
    found = {n: (error(a, t), error(b, t)) for n, a, b, t in zip(("o", "dq", "dk", "dv", "ds", "dg"), ours, loop, true)}
    assert all(mine <= 2 * budget for mine, budget in found.values()), found


@pytest.mark.parametrize("cu", [None, (0, 40, 41, 150)])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(("write", "strong", "HK"), [("additive", 1, 2), ("additive", 64, 1), ("delta", 1, 2)])
def test_the_gradient_of_queries_alone(cu, replayed, write, strong, HK):
    """What the other side of a state reads: the same as beside all other gradients, in the first call and the next;
    also where chunks need levels, and value heads share queries."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    B, T, N = (2, 150, 1) if cu is None else (1, 150, 3)
    q, k, g = draw(B, T, HK, 20), draw(B, T, HK, 20), -strong * draw(B, T, 2, 20).abs() / 8
    v, do, S0 = draw(B, T, 2, 36), draw(B, T, 2, 36), draw(B, N, 2, 20, 36)
    offsets = None if cu is None else torch.tensor(cu)
    beta = draw(B, T, 2).sigmoid() if write == "delta" else None
    k = normalize(k, dim=-1)
    make = Replay if replayed else families.recurrence

    def gradient(queries: bool) -> InputGradients:
        local = make(Rule(write, "diagonal"), Inputs(q, k, v, g, beta), offsets, 0.5)
        return local.gradients(Backward(S0, do, queries=queries), None)

    for _ in range(3 if replayed else 1):
        alone, whole = gradient(True).inputs, gradient(False).inputs
        torch.testing.assert_close(alone.q, whole.q)
        assert alone.k is alone.v is alone.g is alone.beta is None
        assert whole.k is not None


@pytest.mark.parametrize("strong", [1, 64])
@pytest.mark.parametrize("write", ["additive", "delta", "erase"])
def test_a_forward_alone_gives_the_same_output(write, strong):
    """Its kernels leave out what gradients alone read; chunks that need levels and chunks that do not."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    q, k, v, S0 = (
        draw(2, 150, 2, 20),
        normalize(draw(2, 150, 2, 20), dim=-1),
        draw(2, 150, 2, 36),
        draw(2, 1, 2, 20, 36),
    )
    g = -draw(2, 150, 2, 20).abs() / 8
    g[:, 40:80] *= strong
    beta = None if write == "additive" else draw(2, 150, 2).sigmoid()
    x = Inputs(*(t.bfloat16() for t in (q, k, v)), g, beta, k.bfloat16() if write == "erase" else None)
    for first in (None, S0):
        alone, kept = (
            families.recurrence(Rule(write, "diagonal"), x, None, 0.5, OutputUse(saved)).output(first)
            for saved in (False, True)
        )
        assert torch.equal(alone.o, kept.o)
        assert torch.equal(alone.leaving, kept.leaving)
        assert not alone.saved
        assert kept.saved
