"""Where a checked call goes: to one device, or to the ranks of a layout."""

from __future__ import annotations

from ..algebra import Rule
from ..autograd import full_precision, wanting
from ..kernels import InPlaceOthers, Inputs, KnownCall, linear_recurrence_in_place
from ..outputs import LinearAttentionOutput
from .exchange import SplitCall
from .one_device import OneDeviceCall, one_device
from .options import CommonOptions
from .split import SplitRecurrence, forward
from .states import with_rows, without_rows


def run(
    rule: Rule, inputs: Inputs, scale: float, options: CommonOptions, decays: tuple[float, ...] | None = None,
    known: KnownCall | None = None,
) -> LinearAttentionOutput:  # fmt: skip
    """Run a rule over checked inputs. States are ``[N, H, K, V]``.

    `decays` are the heads' log-decays, where every token's are the same and the host knows them; `known` is what is
    known of calls that have all but their values alike.
    """
    initial, cu, mode, backend = options.initial_state, options.cu_seqlens, options.mode, options.backend
    if options.layout is None:
        packed = cu is not None
        S0 = None if initial is None else with_rows(initial, packed)
        if options.in_place:
            assert S0 is not None
            o = linear_recurrence_in_place(inputs, InPlaceOthers(S0, cu, str(rule), scale, mode, backend))
            return LinearAttentionOutput(o, initial)
        call = OneDeviceCall(rule, scale, mode, backend, options.output_final_state, known)
        o, S_end = one_device(call, inputs, S0, cu)
        return LinearAttentionOutput(o, without_rows(S_end, packed) if options.output_final_state else None)
    split: SplitCall | None = None if known is None else known.call
    if split is None:
        kind = rule, scale, mode, backend, options.output_final_state, decays, wanting(*inputs, initial)
        split = SplitCall.kept(options.layout, *kind) if decays is None else SplitCall(rule, options.layout, *kind[1:])
        if known is not None:
            known.call = split
    with full_precision(inputs.q):
        if split.saves:
            o, final = SplitRecurrence.apply(split, known, initial, *inputs)
        else:
            o, final, *_ = forward(split, initial, inputs, known)
    return LinearAttentionOutput(o, final if options.output_final_state else None)
