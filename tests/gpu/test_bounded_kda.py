"""KDA's fused kernels on a Hopper GPU against the fp64 token loop, by gates that forget and by those that do not.

Spans are of 64 tokens, so that they start early, wait for each other, and end within others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la

pytestmark = pytest.mark.gpu

BOUND = -5.0
LIMIT = 8e-3
"""Relative error of bf16, where the kernels that take chunks of 64, another low-precision form of the same function,
are not off by more than half of it."""


def strong(*shape: int) -> Tensor:
    return BOUND * torch.sigmoid(torch.randn(shape, device="cuda"))


def weak(*shape: int) -> Tensor:
    return -0.002 * torch.rand(shape, device="cuda")


def mixed(*shape: int) -> Tensor:
    lives = torch.empty(shape[2:], device="cuda").uniform_(-1.2, 9.2).exp()
    return (-0.6931 / lives).expand(shape).contiguous()


def one_slow(*shape: int) -> Tensor:
    g = strong(*shape)
    g[..., 5] = -0.01
    return g


def hard(*shape: int) -> Tensor:
    return -30 * torch.rand(shape, device="cuda")


def inputs(B: int, T: int, H: int, HK: int, gate: Callable[..., Tensor], handed: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, HK, 128, device="cuda"), dim=-1) for _ in range(2))
    if handed:  # keys that lead the state into the slow channel
        slow = F.one_hot(torch.full_like(k[..., 0], 5, dtype=torch.long), 128)
        k = F.normalize(0.05 * k + slow, dim=-1)
    v, beta = torch.randn(B, T, H, 128, device="cuda"), torch.randn(B, T, H, device="cuda").sigmoid()
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), gate(B, T, H, 128), beta]


@pytest.fixture
def spans_of_64(monkeypatch):
    """Where a piece has four or more, those that wait are left to a launch of their own."""
    from ring_la.kernels import gpu
    from ring_la.kernels.wy import kda_launches

    monkeypatch.setattr(kda_launches, "TOKENS", 0)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 10**6)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")


def errors(x: list[Tensor], cu: Tensor | None, states: bool = True) -> tuple[dict[str, float], dict[str, float]]:
    """Of outputs and gradients, against the token loop: with the bound, and without."""
    v = x[2]
    N = v.shape[0] if cu is None else len(cu) - 1
    S0, dS = (torch.randn(N, v.shape[2], 128, 128, device="cuda") if states else None for _ in range(2))
    do = torch.randn_like(v)

    def run(function: Callable, wide: bool = False, bound: float | None = None) -> list[Tensor]:
        leaves = [t.detach().to(torch.float64 if wide else t.dtype).requires_grad_() for t in x]
        state = None if S0 is None else S0.to(torch.float64 if wide else torch.float32).requires_grad_()
        out = function(*leaves, lower_bound=bound, initial_state=state, output_final_state=states, cu_seqlens=cu)
        ends = [out.o, *([out.final_state] if states else [])]
        given = [t.to(e.dtype) for t, e in zip((do, dS), ends)]
        grads = torch.autograd.grad(ends, [*leaves, *([state] if states else [])], given)
        return [t.detach().double() for t in (*ends, *grads)]

    names = ["o", *(["S"] if states else []), "dq", "dk", "dv", "dg", "dbeta", *(["dS0"] if states else [])]
    true = run(ring_la.reference.kda, wide=True)

    def off(got: list[Tensor]) -> dict[str, float]:
        return {name: float((a - b).norm() / b.norm()) for name, a, b in zip(names, got, true)}

    return off(run(ring_la.kda, bound=BOUND)), off(run(ring_la.kda))


def within(found: tuple[dict[str, float], dict[str, float]]) -> bool:
    bounded, plain = found
    return all(e <= max(LIMIT, 2 * plain[name]) for name, e in bounded.items())  # a NaN is not


@pytest.mark.parametrize("gate", [strong, weak, mixed, one_slow])
@pytest.mark.parametrize(
    ("B", "T", "H", "HK", "cu"),
    [(1, 300, 4, 4, None), (1, 300, 4, 2, (0, 1, 1, 130, 257, 300, 300)), (2, 200, 2, 2, None), (1, 50, 2, 2, None)],
)
def test_outputs_and_gradients(B, T, H, HK, cu, gate, spans_of_64, record_property):
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device="cuda")
    found = errors(inputs(B, T, H, HK, gate), offsets)
    record_property("errors", found)
    assert within(found), found


@pytest.mark.parametrize("gate", [strong, mixed])
def test_spans_that_wait_in_a_line(gate, spans_of_64, monkeypatch, record_property):
    """The launch of their own is for longer pieces."""
    from ring_la.kernels.wy import kda_launches

    monkeypatch.setattr(kda_launches, "TOKENS", 8192)
    found = errors(inputs(1, 300, 2, 2, gate), None)
    record_property("errors", found)
    assert within(found), found


def test_keys_that_hand_the_state_to_a_slow_channel(spans_of_64, record_property):
    found = errors(inputs(1, 400, 2, 2, one_slow, handed=True), None)
    record_property("errors", found)
    assert within(found), found


def test_without_states_and_with_bf16_gates(spans_of_64, record_property):
    q, k, v, g, beta = inputs(1, 300, 4, 4, strong)
    found = errors([q, k, v, g.bfloat16(), beta.bfloat16()], None, states=False)
    record_property("errors", found)
    assert within(found), found


def test_few_heads_at_a_time(spans_of_64, monkeypatch, record_property):
    from ring_la.kernels.wy import kda_launches

    monkeypatch.setattr(kda_launches, "group", lambda chunks, heads: 3)
    found = errors(inputs(1, 300, 7, 7, strong), None)
    record_property("errors", found)
    assert within(found), found


def test_gates_below_the_bound_give_right_outputs_and_gradients_of_nan(spans_of_64):
    x = inputs(1, 200, 2, 2, hard)
    out = ring_la.kda(*x, lower_bound=BOUND).o
    true = ring_la.reference.kda(*[t.double() for t in x]).o
    assert float((out.double() - true).norm() / true.norm()) < LIMIT
    leaves = [t.clone().requires_grad_() for t in x]
    grads = torch.autograd.grad(ring_la.kda(*leaves, lower_bound=BOUND).o.float().sum(), leaves)
    assert all(bool(d.isnan().any()) for d in grads)


def test_calls_again_are_replayed_with_the_same_bits(spans_of_64):
    x = inputs(1, 300, 4, 4, strong)
    with torch.no_grad():
        first, *others = (ring_la.kda(*x, lower_bound=BOUND, output_final_state=True) for _ in range(4))
    for other in others:
        assert torch.equal(first.o, other.o)
        assert torch.equal(first.final_state, other.final_state)
