"""The Triton backend as it is used: what a call does is written down the second time and replayed from the third on.

A call is a few steps of the `Local` protocol in some order. Which launches they need depends on the rule, on shapes,
dtypes and flags; so the steps form a tree whose nodes keep a `Tape` each, and a call that comes by again walks down it.
One that leaves the tree starts over with `TritonRecurrence`, the code the tapes are made from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Border, Inputs
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.recorder import Recorder
from ring_la.kernels.runtime.tape import Playback, StepRecord
from ring_la.kernels.runtime.triton_version import ALIGNMENT
from ring_la.kernels.segments.backend import TritonRecurrence
from ring_la.kernels.segments.base import once

WIDTH = len(Inputs._fields)


class Node(StepRecord):
    """A step after certain others, and the steps that have come next."""

    def __init__(self) -> None:
        super().__init__()
        self.next: dict[Hashable, Node] = {}

    def after(self, key: Hashable) -> Node:
        """The step of this description that comes next."""
        found = self.next.get(key)
        return self.next.setdefault(key, Node()) if found is None else found


@functools.lru_cache(maxsize=512)
def root(key: Hashable) -> Node:
    """Where the calls of one signature begin. Holds no tensor."""
    return Node()


class Brought(NamedTuple):
    """A tensor of the caller, its version if the kernels take a copy, and what they take."""

    place: int
    given: Tensor
    version: int | None
    ready: Tensor

    def stands(self, x: Tensor, dtype: torch.dtype | None) -> bool:
        """Whether `ready` is still what x is."""
        same = self.ready is x or (self.version is not None and self.version == x._version)
        return same and (dtype is None or self.ready.dtype == dtype)


class Step(NamedTuple):
    """A step of this call: what it calls with what, the tensors it was the first to bring, and where it exchanges
    states, if it does."""

    node: Node
    call: Callable
    arguments: tuple
    fresh: list[Tensor]
    border: Border | None = None


class Replay:
    """`TritonRecurrence`, its steps replayed where they are known. `keep`: `kept` will be asked for; not `final`: the
    states that leave are not."""

    prepares, crosses = TritonRecurrence.prepares, TritonRecurrence.crosses

    def __init__(
        self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, kept: Sequence[Tensor | None] = (),
        keep: bool = False, final: bool = True,
    ) -> None:  # fmt: skip
        self._rule, self._scale, self._keep, self._final = rule, float(scale), keep, final
        q, k, v, g, beta, a, b = inputs
        self._dtype = dtype = v.dtype
        self._playing = Playback(v)
        self._brought: dict[int, Brought] = {}
        self._places = 0
        self._fresh: list[Tensor] = []
        self._given: list[Tensor | None] = []
        key: list[Hashable] = [rule, self._scale, keep, v.device]
        given = (q, k, v, once(g), beta, a, b, cu, *kept)
        for x, to in zip(given, (dtype, dtype, dtype, None, None, dtype, dtype, torch.int32, *[None] * len(kept))):
            ready, known = (None, None) if x is None else self._bring(x, to)
            self._given.append(ready)
            key.append(known)
        self._node = root(tuple(key))
        self._played: list[Step] = []
        self._real: TritonRecurrence | None = None
        self._without_history: dict[int, Tensor] = {}
        self._recorder: Recorder | None = None
        self._kept: tuple[Tensor | None, ...] = ()

    # -- the protocol ----------------------------------------------------------------------------------------

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        A, leaving = self._step(_summary, ((S0, torch.float32),), through)
        return A, leaving

    def prepare(self) -> None:
        """Nothing: see `TritonRecurrence`."""

    def output(self, S0: Tensor | None, border: Border | None = None) -> tuple[Tensor, Tensor | None]:
        call = _output_and_kept if self._keep else _output
        o, leaving, *kept = self._step(call, ((S0, torch.float32),), self._final, border=border)
        self._kept = tuple(kept)
        return o, leaving

    def kept(self) -> tuple[Tensor | None, ...]:
        """What spares the gradients work, after `output`; see `TritonRecurrence`."""
        return self._kept

    def adjoint(self, do: Tensor, dS_end: Tensor | None) -> Tensor:
        return self._step(_adjoint, ((do, self._dtype), (dS_end, torch.float32)))[0]

    def prepare_gradients(self, S0: Tensor | None, do: Tensor, gate: bool = True) -> None:
        self._step(_prepare_gradients, ((S0, torch.float32), (do, self._dtype)), gate)

    def gradients(
        self, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool = True, border: Border | None = None
    ) -> tuple[Inputs, Tensor | None]:
        tensors = (S0, torch.float32), (do, self._dtype), (dS_end, torch.float32)
        *grads, dS0 = self._step(_gradients, tensors, gate, border=border)
        return Inputs(*grads), dS0

    # -- steps -----------------------------------------------------------------------------------------------

    def _bring(self, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Hashable]:
        """A tensor of the caller as the kernels take it, and what a node must know of it: its place among those brought
        if it is one of them and what it was, else its shape and dtype."""
        brought = self._brought
        known = brought.get(id(x))
        if known is not None and known.stands(x, dtype):
            return known.ready, known.place
        ready, version, address, own = x, None, x.data_ptr(), x.dtype
        if (dtype is not None and own is not dtype) or address % ALIGNMENT or not x.is_contiguous():
            ready = aligned(x if dtype is None else x.to(dtype))
            version = None if x.is_inference() else x._version
            address, own = ready.data_ptr(), ready.dtype
        brought[id(x)] = Brought(self._places, x, version, ready)
        self._places += 1
        self._playing.bring(ready, address)
        self._fresh.append(ready)
        return ready, (ready.shape, own)

    def _step(
        self, call: Callable, tensors: Sequence[tuple[Tensor | None, torch.dtype]], *flags: bool,
        border: Border | None = None,
    ) -> Sequence[Tensor | None]:  # fmt: skip
        key: list[Hashable] = [call, flags, None if border is None else border.key]
        arguments: list[Tensor | bool | None] = []
        for x, dtype in tensors:
            ready, known = (None, None) if x is None else self._bring(x, dtype)
            arguments.append(ready)
            key.append(known)
        self._node = node = self._node.after(tuple(key))
        step = Step(node, call, (*arguments, *flags), self._fresh, border)
        self._fresh = []
        if self._real is None and node.tape is not None:
            self._played.append(step)
            return node.tape.play(self._playing)
        if self._real is None:  # from here on by the real thing, which does again what tapes have done
            self._recorder = Recorder() if (node.seen or self._played) and not node.refused else None
            for played in self._played:
                self._do(played)
        node.seen = True
        return self._do(step)

    def _do(self, step: Step) -> Sequence[Tensor | None]:
        recorder, node = self._recorder, step.node
        arguments = [self._plain(x) for x in step.arguments]
        keywords = {} if step.border is None else {"border": step.border}
        if recorder is None:
            return step.call(self._begun(), *arguments, **keywords)
        for x in step.fresh:
            recorder.bring(self._plain(x))
        recorder.outlived(() if step.border is None else step.border.memory)
        with recorder:
            out = step.call(self._begun(), *arguments, **keywords)
            kept = self._real.kept() if self._keep else ()
        tape = recorder.finish(out, kept, last=step.call in LAST)
        if node.tape is None:
            node.tape, node.refused = tape, tape is None
        return out

    def _begun(self) -> TritonRecurrence:
        if self._real is None:
            given = [self._plain(x) for x in self._given]
            inputs, cu, kept = Inputs(*given[:WIDTH]), given[WIDTH], tuple(given[WIDTH + 1 :])
            self._real = TritonRecurrence(self._rule, inputs, cu, self._scale, kept)
        return self._real

    def _plain(self, x: Tensor | bool | None) -> Tensor | bool | None:
        """`x` without its history, the same tensor each time."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        if id(x) not in self._without_history:
            self._without_history[id(x)] = x.detach()
        return self._without_history[id(x)]


def _summary(real: TritonRecurrence, S0: Tensor | None, through: bool) -> Sequence[Tensor | None]:
    return real.summary(S0, through)


def _output(
    real: TritonRecurrence, S0: Tensor | None, final: bool, border: Border | None = None
) -> Sequence[Tensor | None]:
    o, leaving = real.output(S0, border=border)
    return o, leaving if final else None


def _output_and_kept(
    real: TritonRecurrence, S0: Tensor | None, final: bool, border: Border | None = None
) -> Sequence[Tensor | None]:
    o, leaving = real.output(S0, keep=True, border=border)
    return o, leaving if final else None, *real.kept()


def _adjoint(real: TritonRecurrence, do: Tensor, dS_end: Tensor | None) -> Sequence[Tensor | None]:
    return (real.adjoint(do, dS_end),)


def _prepare_gradients(real: TritonRecurrence, S0: Tensor | None, do: Tensor, gate: bool) -> Sequence[Tensor | None]:
    real.prepare_gradients(S0, do, gate)
    return ()


def _gradients(
    real: TritonRecurrence, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool,
    border: Border | None = None,
) -> Sequence[Tensor | None]:  # fmt: skip
    grads, dS0 = real.gradients(S0, do, dS_end, gate, border)
    return *grads, None if S0 is None else dS0


LAST = (_output, _output_and_kept, _gradients)
"""Steps after which what is still there is hardly needed."""
