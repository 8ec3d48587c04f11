"""GLA in one launch each way on a Hopper GPU against the fp64 token loop, by gates that forget and that do not.

Spans are of 64 tokens, so that they start early, wait for each other, and end within others.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la

pytestmark = pytest.mark.gpu

LIMIT = 6e-3
"""Relative error of bf16; by chunks of 64 tokens it is half of that."""


def mild(*shape: int) -> Tensor:
    """A gate of every second head forgets nothing."""
    g = F.logsigmoid(torch.randn(shape, device="cuda")) / 16
    g[..., ::2, :] = 0
    return g


def strong(*shape: int) -> Tensor:
    return F.logsigmoid(torch.randn(shape, device="cuda"))


def hard(*shape: int) -> Tensor:
    """Factors of most chunks do not fit."""
    return -30 * torch.rand(shape, device="cuda")


def one_slow_channel(*shape: int) -> Tensor:
    g = strong(*shape)
    g[..., 77] = 0
    return g


@pytest.fixture(autouse=True)
def launches(monkeypatch) -> list:
    """Spans of 64 tokens; those that wait go first. The launches that were made, none replayed before."""
    from ring_la.kernels.replay import root
    from ring_la.kernels.runtime.replayed_function import record_of
    from ring_la.kernels.wy import gdn_launches, gla_launches, one_launch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    monkeypatch.setattr(one_launch, "GLA_BY_LAUNCH", True)
    monkeypatch.setattr(gdn_launches, "picks", lambda programs, device: True)
    monkeypatch.setattr(gdn_launches, "span", lambda *sizes: 64)
    record_of.cache_clear()
    root.cache_clear()
    made, plain = [], gla_launches.forward_kernel
    monkeypatch.setattr(gla_launches, "forward_kernel", lambda *how, **more: made.append(how) or plain(*how, **more))
    return made


def inputs(B: int, T: int, H: int, gate, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, H, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    return [q, k, torch.randn(B, T, H, 128, device="cuda").bfloat16(), gate(B, T, H, 128).to(dtype)]


def errors(x: list[Tensor], cu: Tensor | None) -> dict[str, float]:
    """Of outputs, states and all gradients."""
    N = x[2].shape[0] if cu is None else len(cu) - 1
    S0, dS = (torch.randn(N, x[2].shape[2], 128, 128, device="cuda") for _ in range(2))
    do = torch.randn_like(x[2])

    def run(function, wide: bool) -> list[Tensor]:
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (*x, S0)]
        out = function(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, cu_seqlens=cu)
        ends, seeds = (out.o, out.final_state), (do.to(out.o.dtype), dS.to(out.final_state.dtype))
        return [out.o, out.final_state, *torch.autograd.grad(ends, leaves, seeds)]

    pairs = zip(("o", "S", "q", "k", "v", "g", "S0"), run(ring_la.gla, False), run(ring_la.reference.gla, True))
    return {n: ((a.double() - b).norm() / b.norm()).item() for n, a, b in pairs}


@pytest.mark.parametrize("gate", [mild, strong, hard, one_slow_channel])
@pytest.mark.parametrize(
    ("B", "T", "H", "cu", "dtype"),
    [(1, 1500, 4, None, torch.bfloat16), (1, 900, 4, (0, 1, 1, 130, 257, 900, 900), torch.float32),
     (3, 200, 2, None, torch.bfloat16), (1, 20, 2, None, torch.float32)],
)  # fmt: skip
def test_outputs_states_and_gradients(launches, B, T, H, cu, dtype, gate, record_property):
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device="cuda")
    found = errors(inputs(B, T, H, gate, dtype), offsets)
    record_property("errors", found)
    assert launches, "the chunks' kernels took it"
    assert all(e <= LIMIT for e in found.values()), found  # a NaN is not


def test_gradients_without_what_the_forward_kept(monkeypatch):
    from ring_la.kernels.wy import gla_launches

    monkeypatch.setattr(gla_launches, "group", lambda chunks, heads: 3)
    found = errors(inputs(1, 700, 4, mild, torch.bfloat16), None)
    assert all(e <= LIMIT for e in found.values()), found


def test_calls_again_are_replayed_with_the_same_bits():
    x, runs = inputs(1, 900, 4, mild, torch.bfloat16), []
    for _ in range(5):
        leaves = [t.clone().requires_grad_() for t in x]
        out = ring_la.gla(*leaves, output_final_state=True)
        runs.append(torch.autograd.grad(out.o.float().square().sum() + out.final_state.square().sum(), leaves))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
