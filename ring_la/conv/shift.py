"""Token shift: each token's predecessor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import refuse_transforms
from ..checks import check_flag
from ..context import ShardedLayout
from ..context.handle import found
from ..context.operator import SplitOperator
from ..errors import RingLAError
from ..outputs import TokenShiftOutput
from .arguments import TailOptions, agree, as_channels, check_channels, check_in_place, check_values, facts_of
from .leads import behind, final_rows, together


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
    check_flag("in_place", in_place)
    if not in_place:
        options = TailOptions(initial_state, output_final_state, layout, cu_seqlens)
        if isinstance(layout, ShardedLayout) and cu_seqlens is None and torch.compiler.is_compiling():
            o, final = split_token_shift(x, initial_state, output_final_state, layout.number, options.counted(x))
            return TokenShiftOutput(o, final if output_final_state else None)
        return _token_shift(x, options)
    initial_state = check_in_place(initial_state, layout, x)
    o, final = _token_shift(x, TailOptions(initial_state, True, layout, cu_seqlens))
    assert final is not None
    return TokenShiftOutput(o, initial_state.copy_(final))


def _token_shift(x: Tensor, options: TailOptions) -> TokenShiftOutput:
    state, layout, error = options.initial_state, options.layout, None
    try:
        flat = as_channels(x)
        check_channels("initial_state", state, [options.documents(flat), flat.shape[2]], x)
        refuse_transforms((("x", x), ("initial_state", state)))
        check_values(layout, x=x, initial_state=state)
    except RingLAError as e:
        error = e
    own = dict(initial_state=facts_of(state), output_final_state=options.output_final_state)
    agree("token_shift", layout, error, x, own)
    initial = None if state is None else state[:, None]
    rows = behind(flat, 1, initial, layout, options.cu_seqlens)
    final = final_rows(rows.ends, initial, options)[:, 0].to(x.dtype) if options.output_final_state else None
    return TokenShiftOutput(*together(rows.before.view(x.shape), final, layout))


def _run(x: Tensor, initial_state: Tensor | None, final: bool, layout: int, documents: int) -> tuple[Tensor, Tensor]:
    """`token_shift` on the layout of that number, of so many documents; the last tokens are empty unless `final`."""
    o, last = _token_shift(x, TailOptions(initial_state, final, found(layout), None))
    return o, x.new_empty(0) if last is None else last


def _fake(x: Tensor, initial_state: Tensor | None, final: bool, layout: int, documents: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((documents, x.flatten(2).shape[2]) if final else (0,))


split_token_shift = SplitOperator("split_token_shift", _run, _fake, 2)
"""What a compiled graph has of a token shift on a split sequence."""
