"""A user's whole step as one CUDA graph: no Python between its kernels, exchanges of all ranks among them.

    step = ring_la.capture(step, cp)            # forward; forward, backward and optimizer; a token; a denoising step
    loss = step(ids, targets)                   # the first calls run as ever, then one is captured, then replayed
    step.wait()                                 # the results are there, or a `PeerError` names who is late

A graph repeats its kernels and nothing else: it reads the tensors of its capture, and what the host decided then stays
decided. So calls are told apart by the shapes of their tensors and the values of all else, each kind has a graph of its
own, and what cannot be repeated is an error that names it. `Buckets` bring many lengths down to few kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..comm import Entry
from ..context import ContextParallel
from ..context.arguments import duration
from ..errors import ArgumentError, DisagreementError, PeerError, UnsupportedError
from ..kept import for_a_graph
from .buckets import Buckets
from .calls import hashable, known, own_copy, refuse_elsewhere, refuse_outside, repeated, version, ways
from .graph import StepStream, reason
from .surroundings import Snapshot, Surroundings

AS_FAR = "as far as the end of its capture"
"""What ranks that compare how their captures went say to those that are elsewhere."""

SETTLE = 2.0
"""Seconds that a step takes to end after the process of a rank that has done its part, at most."""
IN_FLIGHT = 2
"""Replays that may wait on the device before a call waits for the oldest."""
HINT = "What waits for the device, or decides by its values, belongs outside of the step"


def capture(
    step: Callable[..., Any],
    cp: ContextParallel | None = None,
    *,
    buckets: Buckets | None = None,
    warmup: int = 3,
    timeout: timedelta | float | None = None,
) -> CapturedStep:
    """A step whose calls become replays of a CUDA graph. On the CPU it runs as it is.

    Args:
        step: any function of tensors (also within tuples, lists and dicts) and other values that can be hashed. What it
            does to other tensors (parameters, gradients, an optimizer's state, a cache) is part of the graph, which
            finds them where they were: the optimizer must be one with capturable=True, and zero_grad belongs into the
            step, at its start. Arguments are copied, so it changes none of them and leaves no gradient on them.
        cp: the ranks it exchanges with; None: none, and the GPU is that of its first argument on one. Every rank makes
            the same calls in the same order.
        buckets: lengths to pad to; None: every length is a kind of its own. Outputs come back padded.
        warmup: calls of a kind that run eagerly, each once on its own data, before one is captured.
        timeout: how long `CapturedStep.wait` gives a replay, a timedelta or seconds; None: that of `cp`, or 300.

    Returns:
        A function like `step`. Tensors it returns are the graph's: the next call of the same kind overwrites them.

    Raises:
        ArgumentError: a wrong argument. In a call UnsupportedError, on every rank: the step cannot be captured, and
            which line of it is why, or what the graph took for granted is no longer so, by name; DisagreementError: the
            ranks' steps differ; PeerError: a rank is late or gone.
    """
    if not callable(step) or isinstance(step, CapturedStep):
        raise ArgumentError("step", "a function", type(step).__name__)
    if cp is not None and not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel or None", type(cp).__name__)
    if buckets is not None and not isinstance(buckets, Buckets):
        raise ArgumentError("buckets", "ring_la.Buckets or None", type(buckets).__name__)
    if not isinstance(warmup, int) or warmup < 1:
        raise ArgumentError("warmup", "an int ≥ 1: what is allocated once must be there before", repr(warmup))
    patience = duration(300.0 if cp is None else cp.timeout) if timeout is None else duration(timeout)
    return CapturedStep(step, cp, buckets, warmup, patience.total_seconds())


@dataclass
class Kind:
    """Calls that one graph is for: how many there were, what ranks compare of each, and once it is captured the graph,
    the tensors it reads, what it returns, what it takes for granted, and tables that it reads of caches."""

    calls: int = 0
    entry: Entry | None = None
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Tensor] = field(default_factory=list)
    output: Any = None
    around: Snapshot | None = None
    tables: list[Any] = field(default_factory=list)


class CapturedStep:
    """What `capture` returns.

    Attributes:
        kinds: the kinds of calls so far.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        cp: ContextParallel | None,
        buckets: Buckets | None,
        warmup: int,
        seconds: float,
    ) -> None:
        self._step, self._cp, self._buckets, self._warmup, self._seconds = step, cp, buckets, warmup, seconds
        self._parameters = signature(step) if buckets is not None else None
        self.kinds: dict[object, Kind] = {}
        self._running: list[torch.cuda.Event] = []
        self._stream: StepStream | None = None
        self._around = Surroundings(step)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(kind.graph is not None for kind in self.kinds.values())

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._buckets is not None:
            assert self._parameters is not None  # there are buckets
            bound = self._parameters.bind(*args, **keywords)
            bound.arguments.update(self._buckets.padded(bound.arguments))
            args, keywords = bound.args, bound.kwargs
        leaves, structure = pytree.tree_flatten((args, keywords))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        device = self._device(tensors)
        if device is not None and StepStream.capturing():
            return self._step(*args, **keywords)  # within another step, whose graph it is part of
        kind = self._kind(leaves, structure, device)
        if device is None:
            return self._step(*args, **keywords)
        self._stream = self._stream or StepStream(device)
        if kind.graph is None and kind.calls <= self._warmup:
            return self._warm(kind, self._stream, args, keywords)
        if kind.graph is None:
            self._capture(kind, leaves, structure, self._stream)
        return self._replay(kind, self._stream, tensors)

    def wait(self) -> None:
        """Until the results of all calls so far are there. Before the host reads one: where a peer has died it would
        read for ever.

        Raises:
            PeerError: a rank is late or gone, by number; from then on the step is of no use.
        """
        while self._running:
            self.finish(self._running.pop(0))
        if self._cp is not None:
            self._cp.comm.refuse_late("the next step")

    def release(self) -> None:
        """Give the graphs up; later calls run eagerly and are captured again. A process group whose messages are in a
        graph waits at its end until that is gone, so this comes before `destroy_process_group`."""
        self._running.clear()
        for kind in self.kinds.values():
            if kind.graph is not None:
                kind.graph.reset()
            kind.calls, kind.graph, kind.inputs, kind.output, kind.around, kind.tables = 0, None, [], None, None, []

    # -- kinds ---------------------------------------------------------------------------------------------

    def _kind(self, leaves: Sequence[Any], structure: pytree.TreeSpec, device: torch.device | None) -> Kind:
        """The kind of a call, which all ranks see for the first time at the same call."""
        seen = [known(x) for x in leaves]
        key = (structure, tuple(seen), repeated(leaves), ways(), self._around.training())
        try:
            kind = self.kinds.get(key)
        except TypeError:
            other = next(type(x).__name__ for x in leaves if not isinstance(x, Tensor) and not hashable(x))
            raise ArgumentError("step", "arguments that are tensors or can be hashed", other) from None
        if kind is None:
            refuse_elsewhere(device, leaves, structure)
            kind = Kind()
            if self._cp is not None and self._cp.validate != "never":
                shown = [f"{len(x[0])} dimensions of {x[1]}" if isinstance(x, tuple) else str(x) for x in seen]
                what = {"kind": len(self.kinds), "arguments": "; ".join(shown), "warmup": self._warmup}
                kind.entry = self._cp.comm.agreement.agree("the captured step", what)
            self.kinds[key] = kind
        elif kind.entry is not None and self._cp is not None:  # a replay enters none of its calls
            self._cp.comm.agreement.again(kind.entry)
        kind.calls += 1
        return kind

    def _device(self, tensors: Sequence[Tensor]) -> torch.device | None:
        """The GPU a step runs on; None: it runs on the CPU."""
        if self._cp is not None:
            return self._cp.device if self._cp.device.type == "cuda" else None
        return next((x.device for x in tensors if x.is_cuda), None)

    # -- on CUDA -------------------------------------------------------------------------------------------

    def _warm(self, kind: Kind, stream: StepStream, args: tuple, keywords: dict) -> Any:
        """The step itself; the last time where waiting for the device is an error, of which all ranks learn."""
        if kind.calls < self._warmup:
            return stream.run(lambda: self._step(*args, **keywords), strict=False)
        out, error = None, None
        try:
            out = stream.run(lambda: self._step(*args, **keywords), strict=True)
        except Exception as e:
            error = e
        waits = isinstance(error, RuntimeError) and "synchronizing CUDA operation" in str(error)
        try:
            self._refuse(error)
        except (UnsupportedError, DisagreementError, PeerError):
            if error is None or waits:
                raise
        if error is not None:
            raise error
        return out

    def _capture(self, kind: Kind, leaves: Sequence[Any], structure: pytree.TreeSpec, stream: StepStream) -> None:
        """Write the step down; nothing is computed. All ranks learn whether all could."""
        copies = {id(x): own_copy(x) for x in leaves if isinstance(x, Tensor)}
        own = [copies.get(id(x), x) for x in leaves]  # a tensor given twice is one, as a compiled step knows it
        args, keywords = pytree.tree_unflatten(own, structure)
        for event in stream.ends():  # here, where a rank that is late is named, since a capture waits without end
            self.finish(event)
        around, error, made, tables = self._around.snapshot(), None, None, []
        versions = [version(x) for x in own]
        try:
            with around, for_a_graph() as tables:
                made = stream.write(lambda: self._step(*args, **keywords))
            refuse_outside(made[1], own, versions)
            around.close()
        except Exception as e:
            error = e
        self._refuse(error)
        assert made is not None  # nothing was refused
        kind.inputs, kind.around = [x for x in own if isinstance(x, Tensor)], around
        (kind.graph, kind.output), kind.tables = made, tables

    def _refuse(self, error: Exception | None) -> None:
        """Raise on every rank why one cannot capture, if one cannot."""
        why = "" if error is None else str(error) if isinstance(error, UnsupportedError) else reason(error)
        told = [why]
        known = isinstance(error, DisagreementError) and AS_FAR in str(error)  # by one that is here, and raises
        if self._cp is not None and self._cp.size > 1 and not known:
            try:
                self._cp.comm.agreement.agree("capturing the step", AS_FAR)
                told = self._cp.comm.agreement.tell(why)
            except (DisagreementError, PeerError):  # another is not even here
                if error is None:
                    raise
        said = {f"rank {r}: {x}" if len({*told}) > 1 else x: None for r, x in enumerate(told) if x}
        if isinstance(error, UnsupportedError) and len(said) == 1:
            raise error
        if said:
            raise UnsupportedError("step", "one that a CUDA graph can repeat", "; ".join(said), HINT) from error

    def _replay(self, kind: Kind, stream: StepStream, tensors: Sequence[Tensor]) -> Any:
        while len(self._running) >= IN_FLIGHT:
            self.finish(self._running.pop(0))
        if self._cp is not None:
            self._cp.comm.refuse_late("a captured step")
        with torch.no_grad():
            for mine, given in zip(kind.inputs, tensors, strict=True):
                mine.copy_(given, non_blocking=True)
        assert kind.graph is not None  # it was captured
        assert kind.around is not None
        kind.graph.replay()
        self._running.append(stream.end())
        kind.around.check()  # while the device works
        kind.around.attach()
        return kind.output

    def finish(self, event: torch.cuda.Event) -> None:
        """Wait for what was launched before an event, calls of this step among it, as long as a peer may take.

        Raises:
            PeerError: as in `wait`.
        """
        start = alive = time.monotonic()
        comm, died = None if self._cp is None else self._cp.comm, None
        with nullcontext() if comm is None else comm.waiting():
            while not event.query():
                now = time.monotonic()
                if comm is not None:
                    comm.refuse_late("the end of a captured step")
                    if died is None:
                        alive, died = now, comm.died() if now > start + SETTLE else None
                    elif now > alive + SETTLE:  # what it had sent is here
                        comm.give_up(died)
                        raise died
                if now > start + self._seconds:
                    late = TimeoutError(f"a captured step has not ended within {self._seconds:g} s")
                    raise late if comm is None else comm.watch.error("running a captured step", late)
                time.sleep(20e-6)
