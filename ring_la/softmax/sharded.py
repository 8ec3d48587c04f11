"""Softmax attention on a split sequence: its plan from a layout, and its autograd Function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..errors import UnsupportedError
from . import core
from .backends import Ask, choose
from .core import Plan, Tensors
from .local import joint_tokens
from .scores import Scores
from .strategies import Job, Ring
from .tokens import tokens_of


@dataclass(frozen=True)
class ShardedCall:
    """Everything about one call on a split sequence but its differentiable tensors."""

    layout: ShardedLayout
    kv_layout: ShardedLayout
    scores: Scores
    joint: str
    strategy: str
    backend: str | None

    def plan(self, x: Tensors) -> Plan:
        """Who holds what, and which kernel computes it."""
        if self.strategy not in ("auto", "ring"):
            raise UnsupportedError("strategy", "'auto' or 'ring'", repr(self.strategy))
        layout, keys_layout, ranks = self.layout, self.kv_layout, range(self.layout.world_size)
        other = None if keys_layout is layout else keys_layout
        rows = tuple(tokens_of(layout, [r], other) for r in ranks)
        keys = tuple(tokens_of(keys_layout, [r]) for r in ranks)
        mixed = len({run.stride for side in (*rows, *keys) for run in side.runs or ()}) > 1
        ask = Ask(
            x.q.device, x.q.dtype, x.q.shape[2], x.k.shape[2], x.q.shape[3], x.v.shape[3], self.scores,
            strided_pairs=mixed,
        )  # fmt: skip
        job = Job(choose(ask, self.backend), self.scores, rows, keys, layout.cp.comm)
        joint_rows = joint_keys = None
        if x.joint_k is not None:
            cu = keys_layout.cu_seqlens
            ends = [b - a for a, b in zip(cu, cu[1:])]
            joint_rows, joint_keys = joint_tokens(
                self.joint, rows[layout.rank], ends, x.joint_k.shape[1], keys_layout.seq_len, x.q.device
            )
        return Plan(job, Ring(), joint_rows, joint_keys)


def attention(call: ShardedCall, x: Tensors) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's queries."""
    return _Sharded.apply(call, *x)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: ShardedCall, *tensors: Tensor | None):
        x = Tensors(*tensors)
        ctx.plan = call.plan(x)
        o, lse = core.forward(ctx.plan, x)
        ctx.save_for_backward(o, lse, *x)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        o, lse, *tensors = ctx.saved_tensors
        return None, *core.backward(ctx.plan, Tensors(*tensors), o, lse, do, dlse)
