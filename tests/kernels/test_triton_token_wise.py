"""Kernels around one recurrence each, interpreted without a GPU: preconditioned keys, a bonus, shares, a solver."""

from __future__ import annotations

import gc

import pytest
import torch

import ring_la
from ring_la.kernels.fused.bonus import plain_bonus
from ring_la.recurrences import mesa
from tests.support.interpreter import interpreted
from tests.support.mesa_cases import errors as mesa_errors
from tests.support.precondition_cases import errors
from tests.support.share_cases import errors as share_errors
from tests.support.triton_cases import error

interpreted()

from ring_la.kernels.fused import bonus_kernel, precondition_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("T", "cu", "spans"), [(70, None, 1), (70, (0, 1, 1, 66, 70), 1),
                                                (230, None, 3), (230, (0, 1, 1, 166, 230), 2)])  # fmt: skip
def test_preconditioned_keys_are_the_token_loop(monkeypatch, T, cu, spans):
    """Two tiles of tokens and of channels; packed, an empty document too; tiles as spans side by side, some of none."""
    monkeypatch.setattr(precondition_kernel, "_spans", lambda *_: spans)
    worst = errors(T, 36, cu, torch.float32, DEVICE)
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


@pytest.mark.parametrize("cu", [None, (0, 0, 1, 66, 70)])
def test_shares_are_those_of_the_token_loop(cu):
    """Logits that grow from tile to tile, and documents that begin with something and with nothing."""
    worst = share_errors(70, 20, cu, torch.float32, DEVICE)
    assert all(e < 1e-5 for e in worst.values()), worst


@pytest.mark.parametrize(("B", "K", "cu"), [(2, 20, (0, 70)), (1, 16, (0, 0, 1, 40, 100))])
def test_systems_are_solved(B, K, cu):
    assert mesa_errors(B, 2, K, cu, True, torch.float32, DEVICE) < 1e-5


def test_a_solver_has_no_wide_copy_of_the_keys_beside_it(monkeypatch):
    """What is written is as narrow as keys while systems are solved."""
    q, k, v = (torch.randn(1, 37, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    beta, lam, wide, of = torch.rand(1, 37, 2), torch.ones(2, 16), [], mesa._solver

    def counted(*given):
        gc.collect()
        held = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == k.shape]
        wide.append(sum(x.dtype == torch.float32 for x in held))
        return of(*given)

    monkeypatch.setattr(mesa, "_solver", counted)
    ring_la.mesa_net(q, k, v, -beta, beta, lam, 2)
    assert wide == [0]
