"""Additive writes times a strength, and what of v passes by the state, by backends that read neither: `mamba2` given Δ
and D beside x, against its reference."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from ring_la.algebra import Rule
from ring_la.kernels import Inputs, strength


@pytest.fixture
def inside(monkeypatch) -> None:
    monkeypatch.setattr(
        sys.modules["ring_la.recurrences.mamba2"], "step_inside", lambda x, B, D: D is None or D.dim() == 1
    )
    torch.manual_seed(0)


def inputs(T: int, skip: str) -> dict[str, Tensor]:
    unit = lambda: F.normalize(torch.randn(1, T, 2, 8), dim=-1)  # noqa: E731
    x = dict(x=torch.randn(1, T, 4, 6), dt=torch.randn(1, T, 4), A=-torch.linspace(1, 4, 4), B=unit(), C=unit())
    x["dt_bias"] = 0.1 * torch.randn(4)
    return x | {"head": {"D": torch.rand(4)}, "channel": {"D": torch.rand(4, 6)}, "none": {}}[skip]


def results(x: dict[str, Tensor], **options) -> list[Tensor]:
    leaves = {n: t.double().requires_grad_() for n, t in x.items()}
    out = ring_la.mamba2(**leaves, dt_softplus=True, output_final_state=True, **options)
    loss = out.o.square().sum() + out.final_state.square().sum()
    return [out.o, out.final_state, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("skip", ["none", "head", "channel"])
@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_mamba2_with_its_step_inside(mode: str, skip: str, inside) -> None:
    x = inputs(70, skip)
    torch.testing.assert_close(results(x, mode=mode), results(x, backend="reference"))


def test_packed(inside) -> None:
    x, cu = inputs(70, "head"), torch.tensor([0, 1, 1, 40, 70])
    torch.testing.assert_close(results(x, cu_seqlens=cu), results(x, backend="reference", cu_seqlens=cu))


def test_names_in_errors_are_the_callers(inside) -> None:
    x = inputs(8, "head")
    with pytest.raises(ring_la.ArgumentError, match=r"\bdt\b"):
        ring_la.mamba2(**x | {"dt": x["dt"][:, :4]})
    with pytest.raises(ring_la.ArgumentError, match=r"\bD\b"):
        ring_la.mamba2(**x | {"D": torch.rand(3)})


def test_which_the_kernels_read() -> None:
    """By head what passes by, which a token cannot change."""
    k, v, b = (torch.zeros(1, 9, 4, D, dtype=torch.bfloat16) for D in (128, 64, 1))
    g, scalar = b[..., 0].float(), Rule("additive", "scalar")
    by_head = torch.rand(4).expand(1, 9, 4)
    given = Inputs(k, k, v, g, g)
    assert strength.read(scalar, given)
    assert strength.read(scalar, given._replace(a=by_head))
    assert not strength.read(scalar, given._replace(a=by_head.contiguous()))
    assert not strength.read(scalar, given._replace(v=v.float()))
    assert not strength.given(Rule("delta", "scalar"), given)
