"""The peer of ``ring-la bench scan``: fla-core, whose kernels take a context-parallel context."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from ring_la.comm import Group

FLA = {"gated_delta_rule": "gated_delta_rule.chunk_gated_delta_rule", "kda": "kda.chunk_kda"}
"""Our operator: fla-core's function."""


def function(name: str) -> Callable[..., tuple]:
    """fla-core's function for one of ours."""
    module, function = FLA[name].split(".")
    return getattr(importlib.import_module(f"fla.ops.{module}"), function)


def fla(name: str, T: int, group: Group | None) -> Callable[..., Tensor]:
    """fla-core's function, alone or under its context parallelism over `group`."""
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True  # its guard of #640, which refuses this Triton; errors are checked here
    op = function(name)
    device = torch.device("cuda", torch.cuda.current_device())
    if group is None:
        cu = torch.tensor([0, T], device=device)
        return lambda *x: op(*x, cu_seqlens=cu)[0]
    from fla.ops.cp import build_cp_context

    context = build_cp_context(torch.tensor([0, T * group.size], device=device), group=group.group)
    return lambda *x: op(*x, cp_context=context)[0]
