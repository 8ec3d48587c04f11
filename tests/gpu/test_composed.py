"""Recurrences made of others over NCCL, one rank a GPU, in fp64, and HGRN's own kernels on one GPU:
`pytest -m gpu tests/gpu/test_composed.py` (`-k sums`: the kernels alone)."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.testing import check_recurrence
from tests.support import (
    gradient_step_cases,
    log_linear_cases,
    mesa_cases,
    momentum_cases,
    pool,
    precondition_cases,
    share_cases,
)
from tests.support.recurrence_cases import COMPOSED, error


def check(rank: int, name: str) -> None:
    check_recurrence(
        getattr(ring_la, name), pool.group(), documents=("small", "small packed"), kinds=("zigzag",),
        scans=("ring", "all_to_all"),
    )  # fmt: skip


@pytest.mark.parametrize("P", [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (2, 4)])
@pytest.mark.parametrize("name", COMPOSED)
def test_split_is_whole(gpu_ranks, name, P):
    gpu_ranks.run(P, check, name)


SUMS = {
    "one span": (60, 200, None, torch.float32),
    "many spans": (3000, 67, None, torch.float32),
    "bf16": (3000, 256, None, torch.bfloat16),
    "fp16": (700, 130, None, torch.float16),
    "packed": (2100, 67, (0, 0, 1, 900, 2100, 2100), torch.float32),
    "packed bf16": (2100, 128, (0, 7, 7, 2100), torch.bfloat16),
    "narrow many spans": (3000, 67, None, torch.float32),
    "narrow packed bf16": (2100, 128, (0, 7, 7, 2100), torch.bfloat16),
}
"""tokens, channels, cu_seqlens, dtype; "narrow": by tiles of 32 tokens, which are not the default"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", SUMS)
def test_kernels_of_sums(case, record_property, monkeypatch):
    pytest.importorskip("triton")
    from ring_la.kernels.sums import walks

    if case.startswith("narrow"):
        monkeypatch.setattr(walks, "TOKENS", 32)
    T, C, cu, dtype = SUMS[case]
    B = 2 if cu is None else 1
    rng = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(B, T, C, device="cuda", generator=rng).to(dtype) for _ in range(2))
    strength = torch.logspace(-3, 1, C, device="cuda")  # from nearly none to a channel that forgets within a token
    g = (-strength * torch.rand(B, T, C, device="cuda", generator=rng)).to(dtype)
    N = B if cu is None else len(cu) - 1
    S, dS = (torch.randn(N, C, device="cuda", generator=rng) for _ in range(2))
    found = []
    for wide, backend in ((False, "triton"), (True, "torch")):
        leaves = [(t.double() if wide else t).detach().requires_grad_() for t in (x, g, S)]
        o, end = ring_la.hgrn(
            *leaves[:2], scale=0.5, initial_state=leaves[2], output_final_state=True, backend=backend,
            cu_seqlens=None if cu is None else torch.tensor(cu, device="cuda"),
        )  # fmt: skip
        loss = (o.double() * weight.double()).sum() + (end.double() * dS).sum()
        found.append([o, end, *torch.autograd.grad(loss, leaves)])
    off = {n: error(a, b) for n, a, b in zip(("o", "S", "dx", "dg", "dS"), *found)}
    record_property("errors", off)
    assert max(off.values()) < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype], off


SLOTS = {
    "fp16, 32 of 64": (63, 64, 32, 1.0, None, torch.float16),
    "fp16, 32 of 64, slow": (63, 64, 32, 50.0, None, torch.float16),
    "bf16, 32 of 128": (300, 128, 32, 1.0, None, torch.bfloat16),
    "bf16, 16 of 64, packed": (300, 64, 16, 10.0, (0, 1, 1, 130, 257, 300), torch.bfloat16),
    "fp32, 32 of 64": (63, 64, 32, 1.0, None, torch.float32),
}
"""tokens, head size, slots, what divides log-decays, cu_seqlens, dtype"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", SLOTS)
def test_kernels_of_slots(case, record_property):
    """With few slots: the first is of fla-core's own tests."""
    pytest.importorskip("triton")
    T, K, M, slow, cu, dtype = SLOTS[case]
    N = 1 if cu is None else len(cu) - 1
    rng = torch.Generator("cuda").manual_seed(42)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=rng)  # noqa: E731
    x = [draw(1, T, 2, D).to(dtype) for D in (K, K, K, M, M)]
    x[4] = (torch.nn.functional.logsigmoid(x[4].float()) / slow).to(dtype)
    x += [draw(N, 2, K, M), draw(N, 2, M, K)]
    weights = [draw(1, T, 2, K), draw(N, 2, K, M), draw(N, 2, M, K)]
    offsets = None if cu is None else torch.tensor(cu, device="cuda")
    found = []
    for wide, backend in ((False, "triton"), (True, "torch")):
        leaves = [(t.double() if wide else t).detach().requires_grad_() for t in x]
        o, ends = ring_la.gated_slot_attention(
            *leaves[:5], initial_state=tuple(leaves[5:]), output_final_state=True, backend=backend, cu_seqlens=offsets
        )
        loss = sum((y.double() * w.double()).sum() for y, w in zip((o, *ends), weights))
        found.append([o, *ends, *torch.autograd.grad(loss, leaves)])
    names = "o", "Hk", "Hv", "dq", "dk", "dv", "ds", "dg", "dHk", "dHv"
    off = {n: error(a, b) for n, a, b in zip(names, *found)}
    record_property("errors", off)
    assert max(off.values()) < {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype], off


PRECONDITIONED = {
    "fp32": (300, 128, None, torch.float32),
    "packed": (300, 36, (0, 1, 1, 190, 300), torch.float32),
    "bf16": (2000, 128, None, torch.bfloat16),
    "packed bf16": (300, 64, (0, 1, 1, 190, 300), torch.bfloat16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", PRECONDITIONED)
def test_kernels_of_preconditioned_keys(case, record_property):
    pytest.importorskip("triton")
    T, K, cu, dtype = PRECONDITIONED[case]
    found = precondition_cases.errors(T, K, cu, dtype, "cuda")
    record_property("errors", found)
    assert max(found.values()) < {torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype], found


LOG_LINEAR = {
    "fp32": (2, (1, 2), (64, 64), ((0, 1000, 0),), torch.float32),
    "bf16 64": (1, (2, 4), (64, 64), ((0, 2000, 0),), torch.bfloat16),
    "bf16 128": (2, (2, 2), (128, 128), ((0, 3000, 0),), torch.bfloat16),
    "fp16 128 to 64": (1, (2, 2), (128, 64), ((0, 1000, 0),), torch.float16),
    "packed": (1, (2, 2), (128, 128), ((0, 7, 0), (7, 8, 0), (8, 1400, 0), (1400, 1500, 0)), torch.bfloat16),
    "later parts": (1, (2, 2), (36, 128), ((0, 100, 37), (100, 640, 64), (640, 2000, 4097)), torch.bfloat16),
}
"""B, heads, head sizes, runs, dtype"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", LOG_LINEAR)
def test_kernels_of_log_linear_attention(case, record_property):
    pytest.importorskip("triton")
    found = log_linear_cases.errors(*LOG_LINEAR[case], "cuda")
    record_property("errors", found)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
    assert max(found.values()) < bound[LOG_LINEAR[case][-1]], found


GRADIENT_STEPS = {
    "128": (1, 512, 2, 128, 16, None, torch.bfloat16),
    "64": (2, 256, 2, 64, 16, None, torch.bfloat16),
    "fp16, 32 a mini-batch": (1, 256, 2, 128, 32, None, torch.float16),
    "64 a mini-batch": (1, 256, 2, 128, 64, None, torch.bfloat16),
    "36, a rest": (1, 150, 2, 36, 16, None, torch.bfloat16),
    "a later part": (1, 300, 2, 128, 16, 21, torch.bfloat16),
}
"""B, T, H, K, mini-batch, position (see `gradient_step_cases`), dtype"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRADIENT_STEPS)
def test_kernels_of_ttt_linear(case, record_property):
    pytest.importorskip("triton")
    found = gradient_step_cases.errors(*GRADIENT_STEPS[case], "cuda")
    record_property("errors", found)
    assert max(found.values()) < 2e-2, found


MOMENTUM = {
    "128": (1, 2, 128, 128, (0, 500), True, torch.bfloat16),
    "64": (2, 2, 64, 64, (0, 300), True, torch.bfloat16),
    "64 to 128": (1, 2, 64, 128, (0, 300), False, torch.bfloat16),
    "128 to 64": (1, 2, 128, 64, (0, 300), False, torch.float16),
    "36, packed": (1, 2, 36, 36, (0, 1, 1, 190, 300), True, torch.bfloat16),
    "fp16, packed": (1, 2, 128, 128, (0, 64, 190, 300), True, torch.float16),
    "long": (1, 1, 128, 128, (0, 4096), True, torch.bfloat16),
}
"""B, H, K, V, offsets, states, dtype"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", MOMENTUM)
def test_kernels_of_momentum(case, record_property):
    pytest.importorskip("triton")
    found = momentum_cases.errors(*MOMENTUM[case], "cuda")
    record_property("errors", found)
    assert max(found.values()) < {torch.float16: 3e-3, torch.bfloat16: 1e-2}[MOMENTUM[case][-1]], found


@pytest.mark.parametrize("P", [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (2, 3, 4)])
@pytest.mark.parametrize("cu", [None, (0, 1, 1, 190, 300)], ids=["rows", "packed"])
def test_ranks_by_kernels_of_momentum(gpu_ranks, P, cu, record_property):
    """A split call goes by the kernels, with several runs of tokens a rank and with one."""
    pytest.importorskip("triton")
    for kind in ("zigzag", "contiguous"):
        for rank, found in enumerate(gpu_ranks.run(P, momentum_cases.rank_errors, torch.bfloat16, cu, kind)):
            record_property(f"errors {kind} {rank}", found)
            assert max(found.values()) < 1e-2, (kind, rank, found)


SHARES = {
    "fp32": (300, 128, None, torch.float32),
    "packed": (300, 36, (0, 1, 1, 190, 300), torch.float32),
    "bf16": (2000, 128, None, torch.bfloat16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHARES)
def test_kernels_of_shares(case, record_property):
    pytest.importorskip("triton")
    T, D, cu, dtype = SHARES[case]
    found = share_cases.errors(T, D, cu, dtype, "cuda")
    record_property("errors", found)
    assert max(found.values()) < {torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype], found


SOLVED = {
    "fp32": (2, 2, 64, (0, 300), True, torch.float32),
    "bf16 128": (2, 2, 128, (0, 1000), False, torch.bfloat16),
    "packed bf16": (1, 2, 64, (0, 0, 1, 190, 600), True, torch.bfloat16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SOLVED)
def test_kernels_of_mesa_net(case, record_property):
    pytest.importorskip("triton")
    found = mesa_cases.errors(*SOLVED[case], "cuda")
    record_property("errors", {"x": found})
    assert found < {torch.float32: 1e-4, torch.bfloat16: 2e-2}[SOLVED[case][-1]], found
