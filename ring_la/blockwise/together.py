"""Steps of ring_la's own on all tokens at once: a row's bits depend on it alone, and gradients of what is shared are
sums over blocks, or tokens, that are added exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only, outside_graphs
from ..context import ShardedLayout
from ..kernels.fused.log_decay import decay_gate, log_decay
from ..kernels.fused.rms_norm import rms_norm
from ..kernels.fused.swiglu import swiglu
from .rows import AT_ONCE
from .sums import OF_TOKENS, exact_sum, part_of
from .switch import pieces_of, places_of


@outside_graphs
def norm_at_once(
    x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float, layout: ShardedLayout
) -> Tensor:
    """`rms_norm` of ``x [B, T, …, D]``."""
    return _Norm.apply(layout, silu, eps, x, weight, gate)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: ShardedLayout, silu: bool, eps: float, x: Tensor, weight: Tensor, gate: Tensor | None
    ) -> Tensor:
        ctx.how, ctx.way_back = (layout, silu, eps), layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(x, weight, gate)
        return rms_norm(x, weight, gate, silu=silu, eps=eps)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> Any:
        from ..kernels.fixed.norm import norm_gradients  # needs Triton

        ctx.way_back()
        (x, weight, gate), (layout, silu, eps) = ctx.saved_tensors, ctx.how
        places = places_of(layout, x.shape[0])
        dx, parts, dgate = norm_gradients(do.to(x.dtype), x, weight, gate, places, silu, eps)
        dweight = part_of(exact_sum(parts, layout, OF_TOKENS), layout, weight) if ctx.needs_input_grad[4] else None
        return None, None, None, dx, dweight, dgate


@outside_graphs
def decay_at_once(_: object, layout: ShardedLayout, a: Tensor, A_log: Tensor | None, bias: Tensor | None) -> Tensor:
    """`decay_gate` of ``a [B, T, C]``."""
    return _Decay.apply(layout, a, A_log, bias)


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, a: Tensor, A_log: Tensor | None, bias: Tensor | None) -> Tensor:
        g = log_decay.forward(a, A_log, bias, 1.0, 1.0, False)
        ctx.layout, ctx.way_back = layout, layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(a, A_log, bias, g)
        return g

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dg: Tensor) -> Any:
        ctx.way_back()
        (a, A_log, bias, g), layout = ctx.saved_tensors, ctx.layout
        y, C = a.float() if bias is None else a.float() + bias.float(), a.shape[-1]
        scale = -torch.ones(C, device=a.device) if A_log is None else _each(-A_log.float().exp(), C)
        da = dg * scale * torch.sigmoid(y)
        parts = torch.cat([dg * g, da], -1).flatten(0, 1)
        of_heads, of_bias = exact_sum(parts, layout, OF_TOKENS).split([C, C])
        dA = None if A_log is None else part_of(of_heads.view(len(A_log), -1).sum(1), layout, A_log)
        dbias = None if bias is None else part_of(of_bias, layout, bias)
        return None, da.to(a.dtype), dA, dbias


def _each(x: Tensor, channels: int) -> Tensor:
    return x[:, None].expand(-1, channels // len(x)).reshape(channels)


def convolve_at_once(
    x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, layout: ShardedLayout
) -> Tensor:
    """The short convolution of ``x [B, T, D]`` in pieces behind `lead` ``[B, pieces, W − 1, D]``, without a graph."""
    from ..kernels.fixed.conv import block_conv  # needs Triton

    table = pieces_of(layout, x.shape[0])
    return block_conv(x.flatten(0, 1), lead.flatten(0, 1), weight, bias, table, silu).view(x.shape)


def convolve_back_at_once(
    do: Tensor, dends: Tensor | None, x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, silu: bool,
    layout: ShardedLayout,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of `convolve_at_once`'s x, weight, bias and lead, given those of its output and of its pieces' last
    W − 1 rows ``[B, pieces, W − 1, D]``. Collective."""
    from ..kernels.fixed.conv import block_conv_gradients  # needs Triton

    table, W = pieces_of(layout, x.shape[0]), weight.shape[1]
    ends = None if dends is None else dends.flatten(0, 1)
    tensors = x.flatten(0, 1), lead.flatten(0, 1), weight, bias
    dx, dlead, parts = block_conv_gradients(do.flatten(0, 1).to(x.dtype), ends, *tensors, table, silu)
    dlead = dlead.view(lead.shape)
    if dends is not None:
        for p, (start, stop) in enumerate(zip(layout.piece_offsets, layout.piece_offsets[1:])):
            if stop - start < W - 1:  # what is left of the lead is among the last rows
                dlead[:, p, stop - start :] += dends[:, p, : W - 1 - (stop - start)].to(x.dtype)
    whole = exact_sum(parts, layout)
    dbias = None if bias is None else part_of(whole[W], layout, bias)
    return dx.view(x.shape), part_of(whole[:W].T, layout, weight), dbias, dlead


@outside_graphs
def discretise_at_once(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None, softplus: bool, layout: ShardedLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """`discretise` of ``x [B, T, H, V]``, and x as `discretise.Added` takes it, where there is a ``D [H]``."""
    return _Discretised.apply(layout, softplus, x, dt, A, bias, D)


class _Discretised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: ShardedLayout, softplus: bool, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None,
        D: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from ..kernels.fused.discretise_kernel import forward  # needs Triton

        ctx.how, ctx.way_back = (layout, softplus), layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(x, dt, A, bias, D)
        return *forward(x, dt, A, bias, softplus), x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dv: Tensor, dg: Tensor, do: Tensor) -> Any:
        from ..kernels.fused.discretise_kernel import by_token  # needs Triton

        ctx.way_back()
        (x, dt, A, bias, D), (layout, softplus) = ctx.saved_tensors, ctx.how
        dx, found = by_token(dv, dg, None if D is None else do, x, dt, A, bias, D, softplus)
        rows = found.movedim(0, 2).flatten(0, 1).flatten(1)
        whole = exact_sum(rows, layout, OF_TOKENS).view(len(found), -1)
        dbias, dA, *dD = (None if t is None else part_of(s, layout, t) for s, t in zip(whole, (bias, A, D)))
        return None, None, dx, found[0].to(dt.dtype), dA, dbias, dD[0] if dD else None


AT_ONCE[decay_gate] = decay_at_once
AT_ONCE[swiglu] = lambda fn, layout, y: fn(y)
