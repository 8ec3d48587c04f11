"""The depthwise causal convolution: each token and the W−1 before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..autograd import first_derivative_only, outside_graphs, refuse_transforms
from ..blockwise import BLOCK, at_once, convolve_at_once, convolve_back_at_once, fixed, led_by_block
from ..checks import check_flag
from ..context import ShardedLayout
from ..context.handle import found
from ..context.operator import SplitOperator
from ..errors import ArgumentError, RingLAError, describe_tensor
from ..kernels.fused.short_conv import LedTokens, convolve, convolve_backward, plain_convolve
from ..outputs import ShortConvOutput
from .arguments import TailOptions, agree, as_channels, check_channels, check_in_place, check_values, facts_of
from .leads import block_leads, final_rows, halo_route, initial_rows, leads, together


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    in_place: bool = False,
) -> ShortConvOutput:
    """Depthwise causal convolution ``y_t = Σ_j weight[:, j] · x_{t−W+1+j} + bias`` along each document.

    Give the channels of q, k and v together: one call is one message.

    Args:
        x: ``[B, T, D]``, or ``[B, T, H, D']`` with ``D = H·D'``.
        weight: ``[D, W]`` (or ``[D, 1, W]``, as nn.Conv1d keeps it), W ≥ 1. bias: ``[D]``.
        activation: None or "silu".
        initial_state: the W−1 inputs before each document, oldest first, ``[N, D, W−1]``; None: zeros. Replicated
            under a layout, and so is its gradient.
        output_final_state: also return each document's last W−1 inputs, on every rank.
        layout: how the sequence is split; T is then this rank's length. cu_seqlens: packing on one device ``[N+1]``.
        in_place: write the final state over `initial_state`, which is then the one returned: one device, no gradients.

    Returns:
        ShortConvOutput(o like x, final_state ``[N, D, W−1]`` in x's dtype, or None).

    Raises:
        ArgumentError: a wrong shape, dtype, device or choice, by name; under a layout on every rank.
    """
    check_flag("in_place", in_place)
    if in_place:
        state = check_in_place(initial_state, layout, x, weight, bias)
        o, final = _short_conv(x, weight, bias, activation, TailOptions(state, True, layout, cu_seqlens))
        assert final is not None
        return ShortConvOutput(o, state.copy_(final))
    options = TailOptions(initial_state, output_final_state, layout, cu_seqlens)
    return _way(options)(x, weight, bias, activation, options)


def _way(options: TailOptions) -> Callable[..., ShortConvOutput]:
    """What does a call that is not in place: where it is traced on a split sequence, one node of the graph."""
    if fixed(options.layout):
        return _outside_graphs
    split = isinstance(options.layout, ShardedLayout) and options.cu_seqlens is None
    return _traced if split and torch.compiler.is_compiling() else _short_conv


def _traced(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: TailOptions
) -> ShortConvOutput:
    """A split call within a compiled graph: one node."""
    state, wanted = options.initial_state, options.output_final_state
    assert options.layout is not None
    number, count = options.layout.number, options.counted(x)
    o, final = split_short_conv(x, weight, bias, state, activation, wanted, number, count)
    return ShortConvOutput(o, final if wanted else None)


def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: TailOptions
) -> ShortConvOutput:
    flat, weight = _checked(x, weight, bias, activation, options)
    silu, width, layout = activation == "silu", weight.shape[1], options.layout
    initial = None if options.initial_state is None else options.initial_state.mT
    if layout is None:
        lead, cu = leads(flat, width - 1, initial, None, options.cu_seqlens)
        o, ends = convolve(flat, weight, bias, lead, cu, silu, options.output_final_state)
    elif fixed(layout) and not (at_once(flat) and width <= BLOCK):
        o, ends = _by_block(layout, flat, weight, bias, initial, silu)
    else:
        own = None if initial is None else initial_rows(flat, width - 1, initial, layout)
        o, ends = _Split.apply(layout, flat, weight, bias, own, silu, options.output_final_state)
    final = final_rows(ends, initial, options).mT.to(x.dtype) if options.output_final_state else None  # type: ignore[arg-type]
    return ShortConvOutput(*together(o.view(x.shape), final, layout))


_outside_graphs = outside_graphs(_short_conv)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    final: bool,
    layout: int,
    documents: int,
) -> tuple[Tensor, Tensor]:
    """`short_conv` on the layout of that number, of so many documents; the final states are empty unless `final`."""
    options = TailOptions(initial_state, final, found(layout), None)
    o, last = _short_conv(x, weight, bias, activation, options)
    return o, x.new_empty(0) if last is None else last


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    final: bool,
    layout: int,
    documents: int,
) -> tuple[Tensor, Tensor]:
    state = (documents, weight.shape[0], weight.shape[-1] - 1) if final else (0,)
    return x.new_empty(x.shape), x.new_empty(state)


split_short_conv = SplitOperator("split_short_conv", _run, _fake, 4)
"""What a compiled graph has of a convolution on a split sequence."""


def _checked(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: TailOptions
) -> tuple[Tensor, Tensor]:
    """``x [B, T, D]`` and ``weight [D, W]``, after the checks and the ranks' agreement."""
    state, layout, width, error, flat = options.initial_state, options.layout, 1, None, None
    try:
        flat, weight = as_channels(x), _weight(weight, x)
        width = weight.shape[1]
        documents = options.documents(flat)
        check_channels("bias", bias, [flat.shape[2]], x)
        check_channels("initial_state", state, [documents, flat.shape[2], width - 1], x)
        if activation not in (None, "silu"):
            raise ArgumentError("activation", "None or 'silu'", repr(activation))
        refuse_transforms((("x", x), ("weight", weight), ("bias", bias), ("initial_state", state)))
        check_values(layout, x=x, weight=weight, bias=bias, initial_state=state)
    except RingLAError as e:
        error = e
    own = dict(width=width, activation=activation, bias=facts_of(bias), initial_state=facts_of(state))
    agree("short_conv", layout, error, x, own | {"output_final_state": options.output_final_state})
    return flat, weight  # type: ignore[return-value]


def _weight(weight: Tensor, x: Tensor) -> Tensor:
    """``weight [D, 1, W]`` or ``[D, W]`` as the latter."""
    channels = x.flatten(2).shape[2]
    if isinstance(weight, Tensor) and weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ArgumentError("weight", f"[D, W] with D = {channels} channels of x", describe_tensor(weight))
    check_channels("weight", weight, list(weight.shape), x)
    return weight


def _by_block(
    layout: ShardedLayout, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """The convolution and each piece's last rows, block by block of the documents (see `blockwise`)."""

    def convolved(x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return plain_convolve(x, weight, bias, lead[:, None], None, silu, False)[0]

    lead, ends = block_leads(x, weight.shape[1] - 1, initial, layout)
    return led_by_block(convolved, x, lead, layout, (weight, bias)), ends


class _Split(torch.autograd.Function):
    """`convolve` on this rank's tokens, or `convolve_at_once`. Other ranks' rows come in one message with their
    neighbours; the gradients of those rows go back as rows and are added to the few they belong to."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        layout: ShardedLayout,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
        silu: bool,
        ends: bool,
    ) -> tuple[Tensor, Tensor | None]:
        width, pieces = weight.shape[1] - 1, len(layout.pieces)
        with layout.cp.comm.streams.in_order():
            halo = halo_route(layout, width).start(x.movedim(1, 0)).wait().movedim(0, 1)
        lead = (halo if own is None else halo + own.to(x.dtype)).unflatten(1, (pieces, width))
        cu = None if pieces == 1 else layout.cu_pieces.to(x.device)
        if fixed(layout):
            o = convolve_at_once(x, lead, weight, bias, silu, layout)
            last = LedTokens.of(x, width, lead, layout.cu_pieces.to(x.device)).ends if ends else None
        else:
            o, last = convolve(x, weight, bias, lead, cu, silu, ends)
        ctx.layout, ctx.silu, ctx.way_back = layout, silu, layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(x, weight, bias, lead, cu, own)
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dends: Tensor | None) -> Any:
        x, weight, bias, lead, cu, own = ctx.saved_tensors
        layout, do = ctx.layout, torch.zeros_like(x) if do is None else do
        ctx.way_back()
        dlead: Tensor | None
        if fixed(layout):
            dx, dweight, dbias, dlead = convolve_back_at_once(do, dends, x, lead, weight, bias, ctx.silu, layout)
        else:
            dx, dweight, dbias, dlead = convolve_backward(do, dends, x, weight, bias, lead, cu, ctx.silu)
        rows = dlead.flatten(1, 2)  # type: ignore[union-attr]
        with layout.cp.comm.streams.in_order():
            back = halo_route(layout, weight.shape[1] - 1).start_back(rows.movedim(1, 0).contiguous(), dx.movedim(1, 0))
            back.wait()
        return None, dx, dweight, dbias, None if own is None else rows.to(own.dtype), None, None
