"""A function's launches written down the second time it is called on one class of tensors, and replayed from the third.

For functions of one step; what `replay` does for the steps of a recurrence. See `tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from ring_la.kernels.triton.launch import aligned
from ring_la.kernels.triton.tape import Known, Playing, Recorder


@functools.lru_cache(maxsize=512)
def _known(key: Hashable) -> Known:
    return Known()


def again(call: Callable[..., Tensor], tensors: Sequence[Tensor | None], *constants: Hashable) -> Tensor:
    """``call(*tensors, *constants)``, which launches kernels and returns one tensor it has made.

    The call sees tensors that are contiguous, aligned and without history.
    """
    given: list[Tensor] = []  # each once
    places: list[int | None] = []
    for x in tensors:
        found = next((n for n, y in enumerate(given) if y is x), None)
        places.append(None if x is None else len(given) if found is None else found)
        if x is not None and found is None:
            given.append(x)
    ready = [aligned(x) for x in given]
    node = _known((call, constants, ready[0].device, tuple(places), *[(x.shape, x.dtype) for x in ready]))
    if node.tape is not None:
        playing = Playing(ready[0])
        for x in ready:
            playing.bring(x)
        return node.tape.play(playing)[0]
    arguments = [None if n is None else ready[n] for n in places]
    if not node.seen or node.refused:
        node.seen = True
        return call(*arguments, *constants)
    recorder = Recorder()
    for x in ready:
        recorder.bring(x)
    with recorder:
        out = call(*arguments, *constants)
    node.tape = recorder.finish([out], last=True)
    node.refused = node.tape is None
    return out
