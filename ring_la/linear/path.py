"""Where a checked call goes: to one device, or to the ranks of a layout."""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..autograd import full_precision, wanting
from ..context import ShardedLayout
from ..kernels import Inputs, linear_recurrence_in_place
from ..outputs import LinearAttentionOutput
from .exchange import SplitCall
from .one_device import OneDeviceCall, one_device
from .split import SplitRecurrence
from .states import with_rows, without_rows


def run(
    rule: Rule,
    inputs: Inputs,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
    mode: str,
    backend: str | None,
    in_place: bool = False,
    decays: tuple[float, ...] | None = None,
) -> LinearAttentionOutput:
    """Run a rule over checked inputs; see `recurrences.recurrence` for the arguments. States are ``[N, H, K, V]``.

    `decays` are the heads' log-decays, where every token's are the same and the host knows them.
    """
    if layout is None:
        packed = cu_seqlens is not None
        S0 = None if initial_state is None else with_rows(initial_state, packed)
        if in_place:
            o = linear_recurrence_in_place(*inputs, S0, cu_seqlens, str(rule), scale, mode, backend)
            return LinearAttentionOutput(o, initial_state)
        call = OneDeviceCall(rule, scale, mode, backend, output_final_state)
        o, S_end = one_device(call, inputs, S0, cu_seqlens)
        return LinearAttentionOutput(o, without_rows(S_end, packed) if output_final_state else None)
    saves = wanting(*inputs, initial_state)
    call = SplitCall(rule, layout, scale, mode, backend, output_final_state, decays, saves)
    with full_precision(inputs.q):
        o, final = SplitRecurrence.apply(call, initial_state, *inputs)
    return LinearAttentionOutput(o, final if output_final_state else None)
