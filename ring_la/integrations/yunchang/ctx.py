"""What a Function's ctx carries from forward to backward, under upstream's names."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from ...errors import UnsupportedError
from .call import Masks, UpstreamCall, group_of


def remember(
    ctx: Any, call: UpstreamCall, group: dist.ProcessGroup | None, attn_type: object, attn_processor: object
) -> None:
    """Everything upstream's backwards read, and our own record."""
    masks = call.masks
    ctx.dropout_p, ctx.softmax_scale, ctx.causal = masks.dropout_p, masks.softmax_scale, masks.causal
    ctx.window_size, ctx.softcap, ctx.alibi_slopes = masks.window_size, masks.softcap, masks.alibi_slopes
    ctx.deterministic, ctx.group = masks.deterministic, group
    ctx.attn_type, ctx.attn_processor = _upstream_type(attn_type), attn_processor
    ctx.ring_la, ctx.ring_la_back = call, group_of(group).agreement.way_back()
    ctx.set_materialize_grads(False)


def recall(ctx: Any, kind: str, tensors: int = 3) -> UpstreamCall:
    """The call of a forward, ours or a subclass's that sets upstream's attributes or some of them; behind
    ours the ranks compare the backward pass.

    Args:
        tensors: how many of the inputs are tensors, without alibi_slopes.
    """
    own = getattr(ctx, "ring_la", None)
    if own is not None:
        ctx.ring_la_back()
        return own
    given: dict[str, Any] = {name: getattr(ctx, name, default) for name, default in Masks._field_defaults.items()}
    masks = Masks(**given)
    unknown = len(ctx.next_functions) - tensors - (masks.alibi_slopes is not None)
    if unknown > 0:  # joint keys: the gradient of q would lack their part
        expected = f"{tensors} tensors among the inputs of a forward that leaves the backward to its base class"
        raise UnsupportedError(_name(ctx), expected, tensors + unknown, "Override backward as well")
    if masks.softmax_scale is None:
        masks = masks._replace(softmax_scale=ctx.saved_tensors[0].shape[-1] ** -0.5)
    return UpstreamCall(kind, masks)


def others(ctx: Any) -> list[None]:
    """The gradients of all inputs after q, k and v: none, and none may be wanted."""
    wanted = [n for n, needed in enumerate(ctx.needs_input_grad) if needed and n > 2]
    if wanted:
        expected = "no gradient of inputs after q, k and v"
        hint = "Such a tensor (alibi_slopes, a subclass's joint tensors) needs a backward of its own, or to be detached"
        raise UnsupportedError(_name(ctx), expected, f"of input {wanted[0]}", hint)
    return [None] * (len(ctx.needs_input_grad) - 3)


def _name(ctx: Any) -> str:
    """The Function whose backward runs."""
    return type(ctx).__name__.removesuffix("Backward")


def _upstream_type(attn_type: object) -> object:
    """What upstream's backward can read: its own AttnType where yunchang is loaded."""
    kernels = sys.modules.get("yunchang.kernels")
    if kernels is None or isinstance(attn_type, kernels.AttnType):
        return attn_type
    return kernels.AttnType.FA if attn_type is None else kernels.AttnType.from_string(attn_type)
