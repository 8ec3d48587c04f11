"""A function's launches written down the second time it is called on one class of tensors, and replayed from the third.

For functions of one step; what `segments.replay` does for the steps of a recurrence. See `tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.observer import observing
from ring_la.kernels.runtime.recorder import Recorder
from ring_la.kernels.runtime.strided import on_boundary
from ring_la.kernels.runtime.tape import Playback, StepRecord
from ring_la.kernels.runtime.triton_version import ALIGNMENT


def replayed(tensors: int, *, strided: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function of so many tensors (or None) and then of constants: calls go by `replayed_call`."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def function(*arguments: Any) -> Any:
            return replayed_call(call, arguments[:tensors], *arguments[tensors:], strided=strided)

        return function

    return decorate


@functools.lru_cache(maxsize=512)
def record_of(signature: Hashable) -> StepRecord:
    """What is known of the calls of one signature. Holds no tensor."""
    return StepRecord()


def replayed_call(
    call: Callable[..., Any], tensors: Sequence[Tensor | None], *constants: Hashable, strided: bool = False
) -> Any:
    """``call(*tensors, *constants)``, which launches kernels and returns what it has made: a tensor, or several tensors
    or None.

    The call sees tensors that are aligned, without history and contiguous, or (`strided`) as they lie. Within a call
    that is being written down it is part of that.
    """
    given: list[Tensor] = []  # each once
    addresses: list[int] = []
    seen: list[Hashable] = []  # of each of `tensors`: what is known of it, or which one before it is
    for x in tensors:
        known: Hashable = None
        if x is not None:
            address = x.data_ptr()
            if address % ALIGNMENT or not (strided or x.is_contiguous()):
                x = on_boundary(x) if strided else aligned(x)
                address = x.data_ptr()
            known = next((n for n, y in enumerate(given) if y is x), None)
            if known is None:
                known = x.shape, x.dtype, x.stride() if strided else None
                given.append(x)
                addresses.append(address)
        seen.append(known)
    record = record_of((given[0].device, call, constants, strided, *seen))
    part = observing.get() is not None
    if record.tape is not None and not part:
        return _played(record, given, addresses)
    given = [x.detach() if x.requires_grad else x for x in given]
    places = iter(given)
    arguments = [x if x is None else given[x] if isinstance(x, int) else next(places) for x in seen]
    if part or record.refused or not record.seen:
        record.seen = record.seen or not part
        return call(*arguments, *constants)
    return _recorded(record, given, lambda: call(*arguments, *constants))


def _played(record: StepRecord, given: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    playback = Playback(given[0])
    for x, address in zip(given, addresses):
        playback.bring(x, address)
    out = record.tape.play(playback)
    return out[0] if len(out) == 1 else tuple(out)


def _recorded(record: StepRecord, given: Sequence[Tensor], call: Callable[[], Any]) -> Any:
    recorder = Recorder()
    for x in given:
        recorder.bring(x)
    with recorder:
        out = call()
    record.tape = recorder.finish([out] if isinstance(out, Tensor) else out, last=True)
    record.refused = record.tape is None
    return out
