"""The outputs and the gradients of chunks in Gluon against the fp64 token loop, on a CPU (`tests.support.gluon`)."""

from __future__ import annotations

import pytest
import torch

from tests.support import gluon
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.triton_cases import Case, errors

interpreted()
compute_bf16()

from ring_la.kernels.families import recurrence  # noqa: E402
from ring_la.kernels.scalar_decay import attend_hopper, chunk_gradients  # noqa: E402
from ring_la.kernels.spans import plan, table  # noqa: E402

pytest.importorskip("triton.experimental.gluon")

CASES = {
    "documents": dict(T=150, cu=(0, 1, 1, 75, 150), states=True),
    "a batch": dict(T=70, B=2, states=False),
    "strong decay": dict(T=130, decay=30.0, states=False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("H", "Hk", "strong"), [(4, 1, True), (4, 2, False), (2, 2, False)])
def test_kernels(H: int, Hk: int, strong: bool, case: str, monkeypatch) -> None:
    """Two heads a program where they share keys; else one."""
    made, plain = [], chunk_gradients.launch

    def launch(kernel, grid, *args, **constants):
        made.append(kernel.__name__)
        run = gluon.launch if hasattr(kernel, "is_gluon") and kernel.is_gluon() else plain
        run(kernel, grid, *args, **constants)

    for module in (chunk_gradients, attend_hopper):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(plan, "hopper", lambda device: True)
    monkeypatch.setattr(table, "PAIRED", True)
    monkeypatch.setattr(table, "LEAST_CHUNKS", 1)
    torch.manual_seed(0)
    sizes = dict(H=H, Hk=Hk, K=128, V=64, dtype=torch.bfloat16, skips=strong and case != "a batch")
    worst = errors(Case("additive_scalar", strong=strong, **sizes, **CASES[case]), recurrence)
    assert set(made) == {
        "attend_hopper_kernel",
        "paired_gradient_kernel" if H > Hk else "additive_gradient_hopper_kernel",
    }
    assert all(e < 6e-3 for e in worst.values()), worst
