"""The peers of ``ring-la bench scan``: fla-core and FlashQLA, whose kernels take a context-parallel context."""

from __future__ import annotations

import functools
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


def fla(name: str, T: int, group: Group | None, bounded: bool = False) -> Callable[..., Tensor]:
    """fla-core's function, alone or under its context parallelism over `group`; with `bounded` gates, of −5 to 0, its
    faster kernels for those."""
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True  # its guard of #640, which refuses this Triton; errors are checked here
    op = functools.partial(function(name), safe_gate=True) if bounded else function(name)
    device = torch.device("cuda", torch.cuda.current_device())
    if group is None:
        cu = torch.tensor([0, T], device=device)
        return lambda *x: op(*x, cu_seqlens=cu)[0]
    from fla.ops.cp import build_cp_context

    context = build_cp_context(torch.tensor([0, T * group.size], device=device), group=group.group)
    return lambda *x: op(*x, cp_context=context)[0]


def flash_qla(T: int, group: Group | None) -> Callable[..., Tensor]:
    """FlashQLA's gated delta rule, alone or under its context parallelism over `group`, whose ranks cut their tokens
    further as it sees fit."""
    from flash_qla import chunk_gated_delta_rule as op

    if group is None:
        return lambda *x: op(*x)[0]
    from flash_qla.ops.gated_delta_rule.chunk import CHUNK_SIZE, build_cp_context

    cu = torch.tensor([0, T * group.size], device=torch.device("cuda", torch.cuda.current_device()))
    how = {"enable_inter": True, "enable_intra": True, "is_train": True, "chunk_size": CHUNK_SIZE}
    context = functools.cache(lambda heads: build_cp_context(cu, group=group.group, num_v_heads=heads, **how))
    return lambda *x: op(*x, cp_context=context(x[2].shape[2]))[0]
