"""Short causal convolutions and token shift on a split sequence: a state that is just a tail.

Every piece (run of tokens of one document) is put behind the W−1 tokens before it, its *lead*: from the previous
segment by one neighbour message, from the document's initial state, or zeros. After that both operators are local.
Where a shard is shorter than the kernel the lead comes from several ranks at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .autograd import first_derivative_only, outside_graphs, refuse_transforms
from .checks import FLOATS, check_flag, check_nan, check_split
from .comm import Replicated, Route, SumOverRanks
from .context import ShardedLayout
from .errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor
from .kernels.fused.short_conv import Rows, convolve, convolve_backward
from .linear import Seams
from .outputs import ShortConvOutput, TokenShiftOutput


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
    run = _short_conv if layout is None else _short_conv_split
    check_flag("in_place", in_place)
    if not in_place:
        return run(x, weight, bias, activation, initial_state, output_final_state, layout, cu_seqlens)
    _check_in_place(initial_state, layout, x, weight, bias)
    o, final = run(x, weight, bias, activation, initial_state, True, layout, cu_seqlens)
    return ShortConvOutput(o, initial_state.copy_(final))


def token_shift(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    in_place: bool = False,
) -> TokenShiftOutput:
    """Each token's predecessor in its document, ``o_t = x_{t−1}`` (RWKV, Peng et al. 2023, arXiv 2305.13048, §3.1).

    Args:
        x: ``[B, T, D]`` or ``[B, T, H, D']``.
        initial_state: the token before each document ``[N, D]``; None: zeros. Replicated under a layout.
        output_final_state: also return each document's last token, on every rank.
        layout, cu_seqlens, in_place: as in `short_conv`.

    Returns:
        TokenShiftOutput(o like x, final_state ``[N, D]`` in x's dtype, or None).

    Raises:
        ArgumentError: a wrong shape, dtype, device or choice, by name; under a layout on every rank.
    """
    run = _token_shift if layout is None else _token_shift_split
    check_flag("in_place", in_place)
    if not in_place:
        return run(x, initial_state, output_final_state, layout, cu_seqlens)
    _check_in_place(initial_state, layout, x)
    o, final = run(x, initial_state, True, layout, cu_seqlens)
    return TokenShiftOutput(o, initial_state.copy_(final))


def _short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
) -> ShortConvOutput:
    width, error = 1, None
    try:
        flat, weight = _flat(x), _weight(weight, x)
        width = weight.shape[1]
        documents = _check(flat, layout, cu_seqlens)
        _check_channels("bias", bias, [flat.shape[2]], x)
        _check_channels("initial_state", initial_state, [documents, flat.shape[2], width - 1], x)
        check_flag("output_final_state", output_final_state)
        if activation not in (None, "silu"):
            raise ArgumentError("activation", "None or 'silu'", repr(activation))
        refuse_transforms((("x", x), ("weight", weight), ("bias", bias), ("initial_state", initial_state)))
        _check_values(layout, x=x, weight=weight, bias=bias, initial_state=initial_state)
    except RingLAError as e:
        error = e
    own = dict(width=width, activation=activation, bias=_facts_of(bias), initial_state=_facts_of(initial_state))
    _agree("short_conv", layout, error, x, own | {"output_final_state": output_final_state})
    initial = None if initial_state is None else initial_state.mT
    if layout is None:
        lead, cu = _leads(flat, width - 1, initial, None, cu_seqlens)
        o, ends = convolve(flat, weight, bias, lead, cu, activation == "silu", output_final_state)
    else:
        own = None if initial is None else _initial_rows(flat, width - 1, initial, layout)
        o, ends = _Split.apply(layout, flat, weight, bias, own, activation == "silu", output_final_state)
    o, final = o.view(x.shape), None
    if output_final_state:
        final = _final(ends, initial, layout, cu_seqlens is not None).mT.to(x.dtype)
    return ShortConvOutput(*(_Together.apply(o, final) if layout is not None and final is not None else (o, final)))


def _token_shift(
    x: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
) -> TokenShiftOutput:
    error = None
    try:
        flat = _flat(x)
        documents = _check(flat, layout, cu_seqlens)
        _check_channels("initial_state", initial_state, [documents, flat.shape[2]], x)
        check_flag("output_final_state", output_final_state)
        refuse_transforms((("x", x), ("initial_state", initial_state)))
        _check_values(layout, x=x, initial_state=initial_state)
    except RingLAError as e:
        error = e
    own = dict(initial_state=_facts_of(initial_state), output_final_state=output_final_state)
    _agree("token_shift", layout, error, x, own)
    initial = None if initial_state is None else initial_state[:, None]
    rows = behind(flat, 1, initial, layout, cu_seqlens)
    o, final = rows.before.view(x.shape), None
    if output_final_state:
        final = _final(rows.ends, initial, layout, cu_seqlens is not None)[:, 0].to(x.dtype)
    return TokenShiftOutput(*(_Together.apply(o, final) if layout is not None and final is not None else (o, final)))


def behind(
    x: Tensor, width: int, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> Rows:
    """The tokens of ``x [B, T, D]``, of any dtype, behind the `width` before them.

    `initial` are the rows before each document ``[N, width, D]``; None: zeros.
    """
    return Rows.of(x, width, *_leads(x, width, initial, layout, cu_seqlens))


_short_conv_split, _token_shift_split = outside_graphs(_short_conv), outside_graphs(_token_shift)


class _Split(torch.autograd.Function):
    """`convolve` on this rank's tokens. Other ranks' rows come in one message with their neighbours; the gradients of
    those rows go back as rows and are added to the few they belong to."""

    @staticmethod
    def forward(
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
        with layout.cp.comm.in_order():
            halo = _halo(layout, width).start(x.movedim(1, 0)).wait().movedim(0, 1)
        lead = (halo if own is None else halo + own.to(x.dtype)).unflatten(1, (pieces, width))
        cu = None if pieces == 1 else layout.cu_pieces.to(x.device)
        o, last = convolve(x, weight, bias, lead, cu, silu, ends)
        ctx.layout, ctx.silu = layout, silu
        ctx.save_for_backward(x, weight, bias, lead, cu, own)
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dends: Tensor | None):
        x, weight, bias, lead, cu, own = ctx.saved_tensors
        layout, do = ctx.layout, torch.zeros_like(x) if do is None else do
        dx, dweight, dbias, dlead = convolve_backward(do, dends, x, weight, bias, lead, cu, ctx.silu)
        rows = dlead.flatten(1, 2)
        with layout.cp.comm.in_order():
            back = _halo(layout, weight.shape[1] - 1).start_back(rows.movedim(1, 0).contiguous(), dx.movedim(1, 0))
            back.wait()
        return None, dx, dweight, dbias, None if own is None else rows.to(own.dtype), None, None


class _Together(torch.autograd.Function):
    """Two outputs whose gradients go back together, zero where one is not used: the way back of a final state sums
    over ranks, so every rank must take it even if its own loss does not use the state."""

    @staticmethod
    def forward(ctx, o: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        return o.view_as(o), final.view_as(final)

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        return do, dfinal


def _leads(
    x: Tensor, width: int, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The `width` rows before each piece ``[B, pieces, width, D]`` (None: zeros), and the pieces' offsets (None: one).

    `initial` is ``[N, width, D]``. Before a document stands its initial state, before another piece what other ranks
    hold of it.
    """
    if layout is None:
        packed = cu_seqlens is not None
        return None if initial is None else initial[None] if packed else initial[:, None], cu_seqlens
    halo = _halo(layout, width)(x, 1)
    if initial is not None:
        halo = halo + _initial_rows(x, width, initial, layout).to(x.dtype)
    return halo.unflatten(1, (len(layout.pieces), width)), layout.cu_pieces.to(x.device)


def _halo(layout: ShardedLayout, width: int) -> Route:
    """Brings the `width` rows before each of this rank's pieces, zeros where a document starts."""
    ranks = range(layout.world_size)
    return layout.route(("lead", width), lambda: [_before(layout, r, width)[0] for r in ranks], neighbours=True)


def _initial_rows(x: Tensor, width: int, initial: Tensor, layout: ShardedLayout) -> Tensor:
    """The rows of the initial states ``[N, width, D]`` that stand before this rank's pieces, else zeros."""
    rows = (initial[None] if layout.packed else initial[:, None]).flatten(1, 2)
    place = layout.kept(("rows before", width), lambda: _before(layout, layout.rank, width)[1].to(x.device))
    mine = Replicated.apply(rows, layout.cp.comm).index_select(1, place.clamp(min=0))
    return mine.masked_fill((place < 0)[:, None], 0)


def _final(ends: Tensor, initial: Tensor | None, layout: ShardedLayout | None, packed: bool) -> Tensor:
    """Each document's last rows ``[N, width, D]`` on every rank, from those of this rank's pieces."""
    if layout is None:
        return ends[0] if packed else ends[:, 0]
    seams = Seams.of(layout)
    pieces, documents = seams.ends
    out = ends.new_zeros(ends.shape[0], layout.num_documents, *ends.shape[2:])
    out = out.index_copy(1, documents, ends.index_select(1, pieces))
    out = SumOverRanks.apply(out, layout.cp.comm)
    if initial is not None and len(seams.empty):
        own = Replicated.apply(initial, layout.cp.comm).to(out.dtype).index_select(0, seams.empty)
        out = out.index_copy(1, seams.empty, own[None])
    return out[0] if layout.packed else out[:, 0]


def _before(layout: ShardedLayout, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """The `width` rows before each piece of a rank: tokens of the sequence, or rows of the initial states (else −1)."""
    tokens, rows = [], []
    for s in layout.local_segments(rank):
        for p in layout.pieces_of(s):
            first = layout.cu_seqlens[p.document]
            for t in range(p.start - width, p.start):
                tokens.append(t if t >= first else -1)
                rows.append(-1 if t >= first else p.document * width + t - first + width)
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)


# -- checks ------------------------------------------------------------------------------------------------


def _flat(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() not in (3, 4) or x.dtype not in FLOATS:
        raise ArgumentError("x", "a float tensor [B, T, D] or [B, T, H, D]", describe_tensor(x))
    return x.flatten(2)


def _weight(weight: Tensor, x: Tensor) -> Tensor:
    channels = x.flatten(2).shape[2]
    if isinstance(weight, Tensor) and weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ArgumentError("weight", f"[D, W] with D = {channels} channels of x", describe_tensor(weight))
    _check_channels("weight", weight, list(weight.shape), x)
    return weight


def _check_channels(name: str, t: Tensor | None, shape: list[int], x: Tensor) -> None:
    if t is None:
        return
    if not isinstance(t, Tensor) or list(t.shape) != shape or t.dtype not in FLOATS:
        raise ArgumentError(name, f"a float tensor {shape}", describe_tensor(t))
    if t.device != x.device:
        raise ArgumentError(name, f"a tensor on {x.device}, where x is", t.device)


def _check_in_place(initial: Tensor | None, layout: ShardedLayout | None, *inputs: Tensor | None) -> None:
    if layout is not None:
        raise UnsupportedError("in_place", "False under a layout", True)
    if not isinstance(initial, Tensor):
        raise ArgumentError("initial_state", "a tensor for in_place=True", describe_tensor(initial))
    wanting = any(isinstance(x, Tensor) and x.requires_grad for x in (initial, *inputs))
    if torch.is_grad_enabled() and wanting:
        raise ArgumentError("in_place", "False where gradients are wanted", True, "Call it under torch.no_grad()")


def _check(flat: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> int:
    return check_split(flat.shape[1], flat.shape[0], layout, cu_seqlens, flat.device)


def _check_values(layout: ShardedLayout | None, **tensors: Tensor | None) -> None:
    """Refuse NaN where the layout's ContextParallel looks at values."""
    if layout is not None and layout.cp.validate == "always":
        for name, t in tensors.items():
            if t is not None:
                check_nan(name, t)


def _facts_of(t: object) -> Facts | None:
    """What ranks compare of a tensor they share; None for what has been refused already."""
    return Facts.of(t) if isinstance(t, Tensor) else None


def _agree(call: str, layout: object, error: RingLAError | None, x: Tensor, own: dict[str, object]) -> None:
    if isinstance(layout, ShardedLayout):
        signature = None
        if error is None:
            signature = (("x", Facts.of(x, 1)), *own.items(), ("gradients", torch.is_grad_enabled()))
        layout.agree(call, signature, error)
    elif error is not None:
        raise error
