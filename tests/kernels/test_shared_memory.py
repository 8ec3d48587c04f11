"""Launches on a GPU whose programs get less shared memory than an H200's."""

from __future__ import annotations

import pytest
import torch

from ring_la.algebra import Rule
from ring_la.kernels import gpu
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.spans import plan, table


@pytest.mark.parametrize(("kilobytes", "stages"), [(228, 3), (164, 3), (100, 1)])
def test_half_the_stages_where_there_is_little(kilobytes: int, stages: int, monkeypatch) -> None:
    """An H200, an A100 and an RTX 4090."""
    monkeypatch.setattr(gpu, "shared_memory", lambda device: kilobytes * 1024)
    little = plan.little_shared
    assert little(torch.device("cuda", 0)) == (stages == 1)
    monkeypatch.setattr(plan, "little_shared", lambda device: little(torch.device("cuda", 0)))
    q, k, v = (torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16) for _ in range(3))
    given = plan.SpanPlan.of(Rule("additive", "scalar"), Inputs(q, k, v, torch.zeros(1, 64, 1)), None, 1.0)
    assert table.pick(table.ADDITIVE_GRADIENT, "additive_scalar", 128, 128, torch.bfloat16).stages == 3
    assert given.pick(table.ADDITIVE_GRADIENT).stages == stages
    assert given.fitting(table.Tiling(64, 4, 1)).stages == 1
