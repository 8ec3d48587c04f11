"""A function's launches written down the second time it is called on one class of tensors, and replayed from the third.

For functions of one step; what `replay` does for the steps of a recurrence. See `tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from ring_la.kernels.runtime.launch import ALIGNMENT, aligned, recording
from ring_la.kernels.runtime.recorder import Recorder
from ring_la.kernels.runtime.strided import based
from ring_la.kernels.runtime.tape import Known, Playing


def replayed(tensors: int, *, strided: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function of so many tensors (or None) and then of constants: it goes by way of `again`."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def function(*arguments: Any) -> Any:
            return again(call, arguments[:tensors], *arguments[tensors:], strided=strided)

        return function

    return decorate


@functools.lru_cache(maxsize=512)
def signature(key: Hashable) -> Known:
    """What is known of the calls of one signature. Holds no tensor."""
    return Known()


def again(call: Callable[..., Any], tensors: Sequence[Tensor | None], *constants: Hashable, strided=False) -> Any:
    """``call(*tensors, *constants)``, which launches kernels and returns what it has made: a tensor, or several tensors
    or None.

    The call sees tensors that are aligned, without history and contiguous, or (`strided`) as they lie. Within a call
    that is being written down it is part of that.
    """
    key: list[Hashable] = [call, constants, strided]
    given: list[Tensor] = []  # each once
    addresses: list[int] = []
    for x in tensors:
        known: Hashable = None
        if x is not None:
            address = x.data_ptr()
            if address % ALIGNMENT or not (strided or x.is_contiguous()):
                x = based(x) if strided else aligned(x)
                address = x.data_ptr()
            known = next((n for n, y in enumerate(given) if y is x), None)
            if known is None:
                known = x.shape, x.dtype, x.stride() if strided else None
                given.append(x)
                addresses.append(address)
        key.append(known)
    node, part = signature((given[0].device, *key)), recording.get() is not None
    if node.tape is not None and not part:
        playing = Playing(given[0])
        for x, address in zip(given, addresses):
            playing.bring(x, address)
        out = node.tape.play(playing)
        return out[0] if len(out) == 1 else tuple(out)
    given = [x.detach() if x.requires_grad else x for x in given]
    places = iter(given)
    arguments = [x if x is None else given[x] if isinstance(x, int) else next(places) for x in key[3:]]
    if part or node.refused or not node.seen:
        node.seen = node.seen or not part
        return call(*arguments, *constants)
    recorder = Recorder()
    for x in given:
        recorder.bring(x)
    with recorder:
        out = call(*arguments, *constants)
    node.tape = recorder.finish([out] if isinstance(out, Tensor) else out, last=True)
    node.refused = node.tape is None
    return out
