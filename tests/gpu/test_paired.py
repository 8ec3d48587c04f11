"""Gradients of two heads that share keys by one program, and Δ in the recurrence's kernels, on the GPU against the fp64
token loop. The first tests are of the kernels, the last of `mamba2`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import ring_la
from ring_la.kernels.families import recurrence
from ring_la.kernels.fused import discretise
from ring_la.kernels.replay import root
from ring_la.kernels.runtime.replayed_function import record_of
from ring_la.kernels.scalar_decay import chunk_gradients
from ring_la.kernels.spans import table
from tests.support.triton_cases import Case, errors

pytestmark = pytest.mark.gpu
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def by_pairs(monkeypatch) -> list[str]:
    """The kernels of chunks' gradients that were launched; none is replayed from before."""
    monkeypatch.setattr(table, "PAIRED", True)
    monkeypatch.setattr(discretise, "STEP_INSIDE", True)
    root.cache_clear()
    record_of.cache_clear()
    torch.manual_seed(0)
    made, plain = [], chunk_gradients.launch
    monkeypatch.setattr(
        chunk_gradients, "launch", lambda kernel, *a, **b: made.append(kernel.__name__) or plain(kernel, *a, **b)
    )
    return made


@pytest.mark.parametrize(("strong", "skips"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "more",
    [
        dict(B=2, T=300, H=4, Hk=2),
        dict(T=300, H=8, Hk=2, cu=(0, 1, 1, 130, 257, 300)),
        dict(T=2000, H=10, Hk=1, states=False),
        dict(T=640, H=4, Hk=1, decay=30.0),
        dict(T=640, H=4, Hk=1, decay=1e-4, bulk=True),
        dict(T=300, H=4, Hk=2, dtype=torch.float16),
    ],
)
def test_kernels(more: dict, strong: bool, skips: bool, monkeypatch, by_pairs, record_property) -> None:
    case = Case("additive_scalar", K=128, V=64, strong=strong, skips=skips, **{"dtype": torch.bfloat16} | more)
    if case.bulk:
        monkeypatch.setattr(table, "DESCRIBED", 0)
    worst = errors(case, recurrence, "cuda")
    record_property("errors", worst)
    assert all(e < LIMIT[case.dtype] for e in worst.values()), worst
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(by_pairs) == {"paired_gradient_kernel"}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 1, 1, 130, 257, 700)])
def test_mamba2(cu: tuple[int, ...] | None, skip: bool, by_pairs, record_property) -> None:
    T, H, G = 700, 8, 2
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device="cuda")
    unit = lambda: F.normalize(torch.randn(1, T, G, 128, device="cuda"), dim=-1)  # noqa: E731
    narrow = dict(
        x=torch.randn(1, T, H, 64, device="cuda"), dt=torch.randn(1, T, H, device="cuda") - 3, B=unit(), C=unit()
    )
    given = {n: t.bfloat16() for n, t in narrow.items()}
    given |= dict(A=-torch.linspace(1, 16, H, device="cuda"), dt_bias=0.1 * torch.randn(H, device="cuda"))
    given |= dict(D=torch.rand(H, device="cuda")) if skip else {}
    S0 = torch.randn(1 if cu is None else len(cu) - 1, H, 128, 64, device="cuda")
    do, dS = torch.randn_like(given["x"]), torch.randn_like(S0)

    def run(function, wide: bool) -> dict[str, torch.Tensor]:
        leaves = {n: (t.double() if wide else t.clone()).requires_grad_() for n, t in (given | dict(S0=S0)).items()}
        start = leaves.pop("S0")
        out = function(**leaves, dt_softplus=True, initial_state=start, output_final_state=True, cu_seqlens=offsets)
        ends, seeds = (out.o, out.final_state), (do.to(out.o.dtype), dS.to(out.final_state.dtype))
        grads = torch.autograd.grad(ends, [*leaves.values(), start], seeds)
        return dict(o=out.o, S=out.final_state) | dict(zip([*leaves, "S0"], grads))

    true = run(ring_la.reference.mamba2, True)
    for _ in range(3):  # the third is replayed
        got = run(ring_la.mamba2, False)
        found = {n: ((got[n].double() - t).norm() / t.norm()).item() for n, t in true.items()}
        record_property("errors", found)
        assert all(e < 6e-3 for e in found.values()), found
    assert by_pairs
