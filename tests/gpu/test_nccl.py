"""Sharded ≡ whole over NCCL, one rank a GPU: `pytest -m gpu tests/gpu/test_nccl.py`.

The conformance checks of the CPU suite on GPUs for every group size P there is: every recurrence × scan × layout ×
packing in fp64 on the PyTorch backend (1e-9), and in fp32 and bf16 on the default backend (Triton where it can).
"""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.scan import STRATEGIES
from tests.support import pool
from tests.support import split_recurrences as sharded
from tests.support.recurrence_cases import RECURRENCES, error, make_inputs

SIZES = (2, 4, 8)
SPLITS = (
    ("dense", "zigzag"), ("packed", "zigzag"), ("packed", "contiguous"), ("uneven", "contiguous"), ("short", "zigzag"),
)  # fmt: skip


def whole_and_split(rank: int, P: int, name: str, dtype: torch.dtype, kind: str, D: int) -> dict[str, float]:
    """The default backend on this rank's tokens against the fp64 PyTorch backend on the whole sequence.

    Returns the ratio of the error to the one-device call's own error in the same dtype, for the output and each input.
    """
    cp = ring_la.ContextParallel(pool.group(P), scan="auto")
    T, cu = 1500, (0, 0, 130, 131, 900, 1500)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    inputs = make_inputs(name, 1, T, Hk=2, H=4, K=D, V=D, dtype=torch.float64, seed=3)
    flags = {n: x for n, x in inputs.items() if not isinstance(x, torch.Tensor)}
    shared = {n for n, x in inputs.items() if n not in flags and x.dim() < 3}
    half = {
        n: x.detach().to(cp.device, torch.float32 if n in shared else dtype)
        for n, x in inputs.items()
        if n not in flags
    }
    do = torch.randn(1, T, 4, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(cp.device, dtype)

    def gradients(x, do, **keywords):
        x = {n: t.clone().requires_grad_() for n, t in x.items()}
        out = getattr(ring_la, name)(**x, **flags, **keywords).o
        grads = torch.autograd.grad((out * do).sum(), list(x.values()))
        return {"o": out.detach(), **{f"d{n}": g for n, g in zip(x, grads)}}

    offsets = torch.tensor(cu, device=cp.device)
    want = gradients({n: t.double() for n, t in half.items()}, do.double(), cu_seqlens=offsets, backend="torch")
    alone = gradients(half, do, cu_seqlens=offsets)
    local = {n: t if n in shared else layout.shard(t) for n, t in half.items()}
    got = gradients(local, layout.shard(do), layout=layout)
    half_a_unit = torch.finfo(dtype).eps / 4  # in the last place, which a kernel of one device may be below
    floor = {n: max(error(g, want[n]), half_a_unit) for n, g in alone.items()}
    ratios = {}
    for n, g in got.items():
        if n[1:] in shared:  # a handful of numbers, whose own error is luck: judged by the call's largest
            ratios[n] = error(cp.comm.all_reduce(g).wait(), want[n]) / max(floor.values())
        else:
            ratios[n] = error(layout.gather(g), want[n]) / floor[n]
    return ratios


def sizes() -> list:
    return [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in SIZES]


@pytest.mark.parametrize(("documents", "kind"), SPLITS)
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("P", sizes())
def test_every_exchange_in_fp64(P, name, documents, kind, gpu_ranks, record_property):
    found = gpu_ranks.run(P, sharded.check_sharded, P, name, documents, kind, tuple(STRATEGIES))
    worst = max(e for errors in found for by in errors.values() for e in by.values())
    record_property("worst", worst)
    assert worst <= 1e-9


@pytest.mark.gpu(needs=2)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_the_default_backend_on_all_gpus(dtype, name, D, gpu_ranks, record_property):
    """Errors are at most twice those of the call on one device, or a unit in the last place."""
    P = gpu_ranks.size
    found = gpu_ranks.run(P, whole_and_split, P, name, dtype, "zigzag", D)
    worst = max(ratio for ratios in found for ratio in ratios.values())
    record_property("worst", worst)
    assert worst <= 2.0
