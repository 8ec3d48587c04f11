"""Kernels around one recurrence each, interpreted without a GPU: preconditioned keys, a bonus, sums that forget."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.kernels.fused.bonus import plain_bonus
from tests.support.interpreter import interpreted
from tests.support.precondition_cases import errors
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import bonus_kernel, ttt_kernel  # noqa: E402
from ring_la.softmax import forgetting_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cu", [None, (0, 1, 1, 66, 70)])
def test_preconditioned_keys_are_the_token_loop(cu):
    """Two tiles of tokens and of channels; packed, an empty document too."""
    worst = errors(70, 36, cu, torch.float32, DEVICE)
    assert all(e < 1e-5 for e in worst.values()), worst


def test_a_bonus_is_its_plain_form():
    """More tokens than one program takes; fewer heads of keys than of values."""
    (B, T, Hk, H, K, V), rng = (2, 70, 1, 2, 20, 12), torch.Generator(DEVICE).manual_seed(0)
    shapes = (B, T, H, V), (B, T, Hk, K), (B, T, Hk, K), (B, T, H, V), (H, K)
    x = [torch.randn(*s, device=DEVICE, generator=rng) for s in shapes]
    do = torch.randn(*shapes[0], device=DEVICE, generator=rng)
    wide = [t.double().requires_grad_() for t in x]
    true = plain_bonus(*wide, 0.5)
    grads = torch.autograd.grad(true, wide[1:], do.double())
    pairs = [(bonus_kernel.forward(*x, 0.5), true), *zip(bonus_kernel.backward(do, *x[1:], 0.5), grads)]
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    assert max(error(a, b) for a, b in pairs) < 1e-5


@pytest.mark.parametrize(("window", "cu"), [(-1, None), (9, (0, 1, 1, 66, 70))])
def test_sums_of_forgetting_attention_have_their_gradient(window, cu):
    """Two tiles of keys and of queries; packed, and with a window; lse has a gradient, too."""
    B, T, H, K, V = 2 if cu is None else 1, 70, 2, 20, 12
    rng = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, D, device=DEVICE, generator=rng) for D in (K, K, V, V))
    dlse, g = (torch.randn(B, H, T, device=DEVICE, generator=rng) for _ in range(2))
    c = (-g.abs()).double().cumsum(-1).requires_grad_()
    at = torch.arange(T, device=DEVICE)
    bounds = torch.tensor((0, T) if cu is None else cu, device=DEVICE)
    document = torch.searchsorted(bounds[1:].contiguous(), at, right=True)
    seen = (at[:, None] >= at) & (document[:, None] == document) & ((at[:, None] - at <= window) | (window < 0))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 0.3 + (c.detach()[..., None] - c[..., None, :])
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    o = torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp(), v.double())
    (true,) = torch.autograd.grad([o, lse], c, [do.double(), dlse.double()])
    delta = (do * o).sum(-1).transpose(1, 2) - dlse
    rest = c.detach(), lse.detach(), do, delta.detach(), 0.3, window, None if cu is None else bounds
    assert error(forgetting_kernel.sums_gradient(q, k, v, *rest), true) < 1e-5


@pytest.mark.parametrize("T", [32, 40])
def test_mini_batches_by_kernel_are_those_of_pytorch(T):
    """From a model and from none; the last mini-batch may have fewer tokens, of an output that nobody goes on from."""
    B, H, K, states = 2, 2, 12, T == 32
    rng = torch.Generator(DEVICE).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=DEVICE, generator=rng)  # noqa: E731
    x = [*(draw(B, T, H, K) for _ in "qkv"), 0.1 * draw(B, T, H).sigmoid(), 1 + 0.1 * draw(H, K), draw(H, K)]
    x += [0.3 * draw(B, H, K, K), draw(B, H, K)] if states else []
    do, dW, dc = draw(B, T, H, K), draw(B, H, K, K), draw(B, H, K)
    wide = [t.double().requires_grad_() for t in x]
    begin = (*wide[6:], dW.double(), dc.double()) if states else None
    true = ring_la.ttt_linear(
        *wide[:6], scale=0.5, initial_state=begin, output_final_state=states, backend="torch", mini_batch=16
    )
    ends = true.final_state[:2] if states else ()
    grads = torch.autograd.grad([true.o, *ends], wide, [t.double() for t in (do, dW, dc)[: 1 + len(ends)]])
    W, c = x[6:] if states else (None, None)
    o, W_end, c_end, Ws, cs = ttt_kernel.forward(*x[:6], W, c, 16, 0.5, 1e-6, True)
    back = (dW, dc) if states else (None, None)
    got = [*ttt_kernel.backward(do, *back, *x[:6], Ws, cs, 16, 0.5, 1e-6)]
    got[4:6] = [t.sum(0) for t in got[4:6]]
    pairs = [(o, true.o), *zip((W_end, c_end), ends), *zip(got, grads)]
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    assert max(error(a, b) for a, b in pairs) < 1e-4, [error(a, b) for a, b in pairs]
