"""The Triton backend as it is used: what a call does is written down the second time and replayed from the third on.

A call is a few steps of the `Local` protocol in some order. Which launches they need depends on the rule, on shapes,
dtypes and flags; so the steps form a tree whose nodes keep a `Tape` each, and a call that comes by again walks down it.
One that leaves the tree starts over with the recurrence of `families`, the code the tapes are made from.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.families import Family, recurrence
from ring_la.kernels.known import Tensors
from ring_la.kernels.protocol import (
    PLAIN,
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Output,
    OutputUse,
    Summary,
)
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.recorder import Recorder
from ring_la.kernels.runtime.tape import Playback, StepRecord, Tape
from ring_la.kernels.runtime.triton_version import ALIGNMENT
from ring_la.kernels.spans.plan import once, query_dtype
from ring_la.kernels.wy import one_launch

VALUES = Inputs._fields.index("v")


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
    """A tensor of the caller (kept, so that its identity stays its own), what the kernels take, and if that is a copy
    the version it is of (None: nobody tells when it changes)."""

    place: int
    given: Tensor
    ready: Tensor
    copied: bool = False
    version: int | None = None

    def stands(self, dtype: torch.dtype | None) -> bool:
        """Whether `ready` is still what was given."""
        same = not self.copied or (self.version is not None and self.version == self.given._version)
        return same and (dtype is None or self.ready.dtype == dtype)


class Result(NamedTuple):
    """What an earlier step has made, by the step's number."""

    step: int


class Step(NamedTuple):
    """A step of this call: what it calls with what, the tensors it was the first to bring, and where it exchanges
    states, if it does."""

    node: Node
    call: Callable[..., tuple[Any, Sequence[Tensor | None]]]
    arguments: tuple[Any, ...]
    fresh: list[Tensor]
    border: Border | None = None


class PlayedPass:
    """Passes that one tape plays (see `known.Shortcut`): of the step `node`, on tensors that lie as the kernels take
    them. `give`: what is made of what the tape returns."""

    __slots__ = ("_border", "_first", "_give", "_knobs", "_node", "_twice")

    def __init__(self, node: Node, border: Border | None, give: Callable[..., Any], tensors: Tensors) -> None:
        self._node, self._border, self._give, self._knobs = weakref.ref(node), border, give, one_launch.knobs()
        place = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        self._first = tuple(i for i, x in enumerate(tensors) if x is not None and place[id(x)] == i)
        self._twice = tuple((place[id(x)], i) for i, x in enumerate(tensors) if x is not None and place[id(x)] < i)

    def ready(self, tensors: Tensors, border: Border | None) -> Callable[[], Any] | None:
        node = self._node()  # what tapes are kept of may have been cleared
        if node is None or node.tape is None or border is not self._border or self._knobs != one_launch.knobs():
            return None
        for i, j in self._twice:
            if tensors[i] is not tensors[j]:
                return None
        playing = Playback(tensors[VALUES])
        for i in self._first:
            x = tensors[i]
            if x is None or x.data_ptr() % ALIGNMENT or not x.is_contiguous():
                return None
            playing.bring(x, x.data_ptr())
        return functools.partial(_played, self._give, node.tape, playing)


def _played(give: Callable[..., Any], tape: Tape, playing: Playback) -> Any:
    return give(*tape.play(playing))


def _as_output(o: Tensor, leaving: Tensor | None, *saved: Tensor | None) -> Output:
    return Output(o, leaving, saved)


def _as_gradients(*made: Tensor | None) -> InputGradients:
    *grads, dS0 = made
    return InputGradients(Inputs(*grads), dS0)


class Replay:
    """The recurrence of `families`, its steps replayed where they are known."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = True

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse = PLAIN) -> None:
        self._rule, self._scale, self._use = rule, float(scale), use
        q, k, v, g, beta, a, b = inputs
        self._dtype = dtype = v.dtype
        self._playing = Playback(v)
        self._brought: dict[int, Brought] = {}
        self._places = 0
        self._fresh: list[Tensor] = []
        self._given: list[Tensor | None] = []
        key: list[Hashable] = [rule, self._scale, use, v.device, one_launch.knobs()]
        queries = query_dtype(rule, q, dtype)
        skip = (once(a), None) if rule.write == "additive" else (a, dtype)
        given = ((q, queries), (k, dtype), (v, dtype), (once(g), None), (beta, None), skip, (b, dtype))
        for x, to in (*given, (cu, torch.int32)):
            ready, known = self._bring(x, to)
            self._given.append(ready)
            key.append(known)
        self._node = root(tuple(key))
        self._steps: list[Step] = []
        self._real: Family | None = None
        self._results: list[Any] = []  # of the real recurrence's steps
        self._without_history: dict[int, Tensor] = {}
        self._recorder: Recorder | None = None

    # -- the protocol ----------------------------------------------------------------------------------------

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Result] | None = None) -> Summary[Result]:
        A, leaving = self._step(_summary, ((S0, torch.float32),), (through, known and known.found))  # type: ignore[arg-type]
        return Summary(A, leaving, self._result)

    def prepare(self, summary: Summary[Result]) -> Summary[Result]:
        """As it is: see `families`."""
        return summary

    def output(self, S0: Tensor | None, summary: Summary[Result] | None = None, border: Border | None = None) -> Output:
        return _as_output(*self._step(_output, ((S0, torch.float32),), (summary and summary.found,), border))  # type: ignore[arg-type]

    def shortcut(self, tensors: Tensors) -> PlayedPass | None:
        """How the output or the gradients were made, if by the tape of one step, of tensors as they came."""
        if self._real is not None or len(self._steps) != 1:
            return None
        (step,) = self._steps
        as_given = [*dict.fromkeys(id(x) for x in tensors if x is not None)]
        brought = [id(x.given) for x in self._brought.values() if not x.copied]
        give = GIVES.get(step.call)
        plain = len(brought) == len(self._brought) and brought == as_given
        return PlayedPass(step.node, step.border, give, tensors) if plain and give is not None else None

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Result]:
        (entering,) = self._step(_adjoint, self._tensors(backward, dS_end), (backward.gate,))
        return Adjoint(entering, self._result)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Result]) -> Adjoint[Result]:
        self._step(_prepare_gradients, self._tensors(backward, None), (backward.gate, adjoint.found))
        return Adjoint(adjoint.entering, self._result)

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Result] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        flags = backward.gate, backward.queries, adjoint and adjoint.found
        return _as_gradients(*self._step(_gradients, self._tensors(backward, dS_end), flags, border))  # type: ignore[arg-type]

    # -- steps -----------------------------------------------------------------------------------------------

    def _tensors(self, backward: Backward, dS_end: Tensor | None) -> list[tuple[Tensor | None, torch.dtype | None]]:
        """Those of a step backward, and the dtypes they are taken in."""
        saved = [(x, None) for x in backward.saved]
        return [(dS_end, torch.float32), (backward.S0, torch.float32), (backward.do, self._dtype), *saved]

    @property
    def _result(self) -> Result:
        """Of the last step."""
        return Result(len(self._steps) - 1)

    def _bring(self, x: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor | None, Hashable]:
        """A tensor of the caller as the kernels take it, and what a node must know of it: its place among those brought
        if it is one of them and what it was, else its shape and dtype."""
        if x is None:
            return None, None
        brought = self._brought
        known = brought.get(id(x))
        if known is not None and known.stands(dtype):
            return known.ready, known.place
        ready, address, own = x, x.data_ptr(), x.dtype
        copied = (dtype is not None and own is not dtype) or address % ALIGNMENT != 0 or not x.is_contiguous()
        if copied:
            ready = aligned(x if dtype is None else x.to(dtype))
            address, own = ready.data_ptr(), ready.dtype
        version = x._version if copied and not x.is_inference() else None
        brought[id(x)] = Brought(self._places, x, ready, copied, version)
        self._places += 1
        self._playing.bring(ready, address)
        self._fresh.append(ready)
        return ready, (ready.shape, own)

    def _step(
        self, call: Callable[..., tuple[Any, Sequence[Tensor | None]]],
        tensors: Sequence[tuple[Tensor | None, torch.dtype | None]], flags: tuple[Result | bool | None, ...],
        border: Border | None = None,
    ) -> Sequence[Tensor | None]:  # fmt: skip
        key: list[Hashable] = [call, flags, None if border is None else border.key]
        arguments: list[Tensor | None] = []
        for x, dtype in tensors:
            ready, known = self._bring(x, dtype)
            arguments.append(ready)
            key.append(known)
        self._node = node = self._node.after(tuple(key))
        step = Step(node, call, (*flags, *arguments), self._fresh, border)
        self._fresh, before = [], self._steps.copy()
        self._steps.append(step)
        if self._real is None and node.tape is not None:
            return node.tape.play(self._playing)
        if self._real is None:  # from here on by the real thing, which does again what tapes have done
            self._recorder = Recorder() if (node.seen or before) and not node.refused else None
            for played in before:
                self._do(played)
        node.seen = True
        return self._do(step)

    def _do(self, step: Step) -> Sequence[Tensor | None]:
        recorder, node = self._recorder, step.node
        arguments = [self._plain(x) for x in step.arguments]
        keywords = {} if step.border is None else {"border": step.border}
        if recorder is None:
            made, out = step.call(self._begun(), *arguments, **keywords)
            self._results.append(made)
            return out
        for x in step.fresh:
            recorder.bring(self._plain(x))
        recorder.outlived(() if step.border is None else step.border.memory)
        with recorder:
            made, out = step.call(self._begun(), *arguments, **keywords)
        self._results.append(made)
        savable = made.found.savable if self._use.saved and isinstance(made, Summary) else ()
        tape = recorder.finish(out, savable, last=step.call in LAST)
        if node.tape is None:
            node.tape, node.refused = tape, tape is None
        return out

    def _begun(self) -> Family:
        if self._real is None:
            *inputs, cu = (self._plain(x) for x in self._given)
            self._real = recurrence(self._rule, Inputs(*inputs), cu, self._scale, self._use)  # type: ignore[assignment]
        return self._real

    def _plain(self, x: Any) -> Any:
        """A step's argument for the real recurrence: a tensor without its history, the same each time, or what a step
        has made."""
        if isinstance(x, Result):
            return self._results[x.step]
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        if id(x) not in self._without_history:
            self._without_history[id(x)] = x.detach()
        return self._without_history[id(x)]


# What each step calls: what it makes, and the tensors of that which its caller sees.


def _summary(
    real: Family, through: bool, known: Summary[Any] | None, S0: Tensor | None
) -> tuple[Summary[Any], Sequence[Tensor | None]]:
    made = real.summary(S0, through, known)
    return made, (made.transition, made.leaving)


def _output(
    real: Family, summary: Summary[Any] | None, S0: Tensor | None, border: Border | None = None
) -> tuple[Output, Sequence[Tensor | None]]:
    made = real.output(S0, summary, border)
    return made, (made.o, made.leaving if real.use.final else None, *made.saved)


def _adjoint(
    real: Family, gate: bool, dS_end: Tensor | None, S0: Tensor | None, do: Tensor, *saved: Tensor | None
) -> tuple[Adjoint[Any], Sequence[Tensor | None]]:
    made = real.adjoint(Backward(S0, do, saved, gate), dS_end)
    return made, (made.entering,)


def _prepare_gradients(
    real: Family, gate: bool, adjoint: Adjoint[Any], _: None, S0: Tensor | None, do: Tensor, *saved: Tensor | None
) -> tuple[Adjoint[Any], Sequence[Tensor | None]]:
    return real.prepare_gradients(Backward(S0, do, saved, gate), adjoint), ()


def _gradients(
    real: Family, gate: bool, queries: bool, adjoint: Adjoint[Any] | None, dS_end: Tensor | None, S0: Tensor | None,
    do: Tensor, *saved: Tensor | None, border: Border | None = None,
) -> tuple[InputGradients, Sequence[Tensor | None]]:  # fmt: skip
    made = real.gradients(Backward(S0, do, saved, gate, queries), dS_end, adjoint, border)
    return made, (*made.inputs, made.entering)


GIVES: dict[Callable[..., Any], Callable[..., Any]] = {_output: _as_output, _gradients: _as_gradients}
"""What is made of what steps return that are a whole pass."""
LAST = (_output, _gradients)
"""Steps after which what is still there is hardly needed."""
