"""The kernels in CUDA C++ for Hopper, put where a GPU's would run (`tests.support.hopper`); results against fp64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels import gpu  # noqa: E402
from ring_la.kernels.wy import across, dplr_launches, gdn_launches, gla_launches, kda_launches  # noqa: E402
from tests.support.hopper import Emulated  # noqa: E402

LIMIT = 6e-3
"""Relative error of bf16, as on the GPU; the kernels that take chunks of 64 are not off by more than half of it."""


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run here, their threads in an order that is drawn; spans are short, and combine in long rows."""
    both = (
        (module, name)
        for module in (gdn_launches, gla_launches, dplr_launches)
        for name in ("forward_kernel", "backward_kernel")
    )
    for module, name in (*both, (kda_launches, "kernel")):
        made = getattr(module, name)
        made = functools.cache(lambda *how, made=made, **more: Emulated(made(*how, **more), seed=1))
        monkeypatch.setattr(module, name, made)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 10**6)
    for module in (gdn_launches, kda_launches):
        monkeypatch.setattr(module, "zeros", Emulated.zeros)
    monkeypatch.setattr(across, "clear", Emulated.clear)
    for module in (gdn_launches, kda_launches):
        monkeypatch.setattr(module, "side_by_side", lambda programs, device: programs <= Emulated.BESIDE)
    monkeypatch.setattr(gdn_launches, "span", lambda *sizes: 64)
    monkeypatch.setattr(gdn_launches, "across", lambda *sizes: (64, 64))
    monkeypatch.setattr(gdn_launches, "TOGETHER", 3)
    monkeypatch.setattr(gdn_launches, "GROUPED", 6)
    monkeypatch.setattr(gdn_launches, "picks", lambda programs, device: True)
    monkeypatch.setattr(kda_launches, "TOKENS", 0)


def draw(T: int, H: int, HK: int) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, T, HK, 128), dim=-1).bfloat16() for _ in range(2))
    return [q, k, torch.randn(1, T, H, 128).bfloat16(), torch.randn(1, T, H).sigmoid()]


def check(
    function, x: list[Tensor], cu, got: dict[str, Tensor], S0: Tensor, do: Tensor, dS: Tensor, limit: float = LIMIT
) -> dict[str, float]:
    """Outputs, states and all gradients; their errors."""
    leaves = [t.double().requires_grad_() for t in (*x, S0)]
    want = function(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, cu_seqlens=cu)
    grads = torch.autograd.grad((want.o, want.final_state), leaves, (do.double(), dS.double()))
    names = [n for n in got if n not in ("o", "S", "S0")] + ["S0"]
    wanted = {"o": want.o, "S": want.final_state, **dict(zip(names, grads, strict=True))}
    found = {n: ((got[n].reshape(y.shape).double() - y).norm() / y.norm()).item() for n, y in wanted.items()}
    assert all(e <= limit for e in found.values()), found
    return found
