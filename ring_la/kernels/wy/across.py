"""What the launches in CUDA C++ on Hopper do where states meet those of other ranks (see `scanned_spans`): a launch
finds what spans do to a state, another goes over all spans at once, each from what enters it, and backward the same.

What the maps' launches leave out (see `maps.cuh`) the others do not ask for: both decide alike, by the same bound.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs, Mail, SpanMaps
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy import gdn_launches, kda_launches
from ring_la.kernels.wy.gdn_launches import GDNCall, KeptChunks
from ring_la.kernels.wy.kda_launches import HEAD, KDACall, Passing

Saved = tuple[Tensor | None, ...]


Chunks = tuple[Tensor, Tensor] | None
"""What KDA's backward takes of chunks, where it is there."""


class Cut(NamedTuple):
    """A call as a rule's kernels take it, and its spans; of rows that are cut evenly those of one row."""

    call: Any
    spans: Runs


class SpanKernels(Protocol):
    """A rule's launches. States are those of spans ``[B, NS, H, K, V]``.

    Attributes:
        left: how many tensors `output` leaves for the gradients.
    """

    left: ClassVar[int]

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        """The call, which gradients follow if it is to `train`; all of its spans have one length."""
        ...

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        """Whether there is room for what gradients take."""
        ...

    def mails(self, call: Any, back: bool) -> bool:
        """Whether they send states, and take those that come, themselves where spans forget; no others are given a
        `mail`, or asked what is `mailed`."""
        ...

    def maps(self, call: Any, mailed: bool) -> SpanMaps:
        """What each span does to the state that enters it; `mailed`: with `SpanMaps.mailed`."""
        ...

    def output(
        self, call: Any, entering: Tensor, maps: SpanMaps, keep: bool, mail: Mail | None
    ) -> tuple[Tensor, Saved]:
        """o, and if `keep` what the gradients take, of the states that enter the spans."""
        ...

    def added_back(self, call: Any, saved: Saved, do: Tensor, mailed: bool) -> tuple[Tensor, Tensor | None]:
        """What each span adds to the gradient of the state that enters it, and (`mailed`) `SpanMaps.mailed`."""
        ...

    def prepared(self, call: Any, saved: Saved) -> Chunks:
        """What the gradients take that needs no gradient of a state, and `saved` lacks; None: nothing, or later."""
        ...

    def gradients(
        self, call: Any, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        mail: Mail | None,
    ) -> Inputs:  # fmt: skip
        """Those of the inputs, of the gradients of the states that leave the spans."""
        ...


def _cut(call: GDNCall | KDACall, chunk: int) -> Cut:
    rows = call.inputs.v.shape[0]
    return Cut(call, Runs(call.length, chunk, call.count // rows, 1, None, None) if call.runs is None else call.runs)


def _heads(call: GDNCall | KDACall) -> range:
    return range(call.inputs.v.shape[2])


def _room(call: GDNCall | KDACall) -> Tensor:
    """For a state of every span, or its transition."""
    B, _, H, _ = call.inputs.v.shape
    return call.new(B, call.count // B, H, HEAD, HEAD)


def _maps(call: GDNCall | KDACall) -> tuple[SpanMaps, Passing]:
    """Room for those, and a launch's part of it."""
    B, _, H, _ = call.inputs.v.shape
    spans = B, call.count // B, H
    zero, squares = call.new(*spans, dtype=torch.int32), call.new(*spans, 8)
    found = SpanMaps("dense", _room(call), _room(call), True, zero, squares)
    return found, Passing(found.own, found.transition, maps=True, zero=zero, squares=squares)


def _given(
    states: Tensor, mail: Mail | None = None, maps: SpanMaps | None = None, entering: Tensor | None = None
) -> Passing:
    """The state that every span begins from; beside it, what leaves by `mail` under `maps`, and what is `entering`
    so."""
    if mail is None:
        return Passing(states, given=True)
    assert maps is not None
    assert maps.mailed is not None
    assert entering is not None
    memory, numbers = mail
    return Passing(states, maps.own, given=True, zero=maps.zero, mail=(*memory, maps.mailed, entering, *numbers))


class DeltaSpans:
    """The delta rule's and the gated delta rule's."""

    left: ClassVar[int] = 3

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        return _cut(GDNCall.of(inputs, cu, scale, gdn_launches.across), gdn_launches.CHUNK)

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return gdn_launches.keeps(inputs, cu)

    def mails(self, call: GDNCall, back: bool) -> bool:
        return False

    def maps(self, call: GDNCall, mailed: bool) -> SpanMaps:
        found, passing = _maps(call)
        kernel = partial(gdn_launches.forward_kernel, False, *call.defines, maps=True)
        call.launch(kernel, _heads(call), None, (None, None), (None,) * 3, passing=passing)
        return found

    def output(
        self, call: GDNCall, entering: Tensor, maps: SpanMaps, keep: bool, mail: Mail | None
    ) -> tuple[Tensor, Saved]:
        o, heads = torch.empty_like(call.inputs.v), _heads(call)
        kept = gdn_launches.room(call, len(heads)) if keep else (None,) * 3
        passing = Passing(entering, given=True)
        kernel = partial(gdn_launches.forward_kernel, keep, *call.defines)
        call.launch(kernel, heads, o, (None, None), kept, passing=passing)
        return o, tuple(kept) if keep else ()

    def added_back(self, call: GDNCall, saved: Saved, do: Tensor, mailed: bool) -> tuple[Tensor, Tensor | None]:
        found, (states, writes, pairs) = _room(call), saved
        kernel = partial(gdn_launches.backward_kernel, *call.defines, maps=True)
        passing = Passing(found, maps=True)
        kept, further = KeptChunks(states, writes, pairs), (do, *(None,) * 5)
        call.launch(kernel, _heads(call), None, (None, None), kept, further, passing)
        return found, None

    def prepared(self, call: GDNCall, saved: Saved) -> Chunks:
        return None

    def gradients(
        self, call: GDNCall, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        mail: Mail | None,
    ) -> Inputs:  # fmt: skip
        to, (states, writes, pairs) = gdn_launches.results(call), saved
        kept, further = KeptChunks(states, writes, pairs), (do, *to.qkv, to.g, to.beta)
        passing = Passing(entering, given=True)
        kernel = partial(gdn_launches.backward_kernel, *call.defines)
        call.launch(kernel, _heads(call), None, (None, None), kept, further, passing)
        return by_key_head(to, call.inputs.q.shape[2])


class KDASpans:
    """KDA's by a bounded gate. What is kept is what enters the spans, from which the backward makes chunks' states."""

    left: ClassVar[int] = 1

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        B, T, H = inputs.v.shape[:3]
        heads = kda_launches.group(kda_launches.chunks(B, T, cu), H) if train else H  # of one launch
        return _cut(KDACall.of(inputs, cu, scale, heads), kda_launches.CHUNK)

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return True

    def mails(self, call: KDACall, back: bool) -> bool:
        H = len(_heads(call))  # in groups, a launch would send behind others' states and gradients
        return not back or kda_launches.group(call.chunks, H) == H

    def maps(self, call: KDACall, mailed: bool) -> SpanMaps:
        found, passing = _maps(call)
        call.launch("forward", _heads(call), None, (None, None), passing=passing)
        return found._replace(mailed=found.zero) if mailed else found

    def output(
        self, call: KDACall, entering: Tensor, maps: SpanMaps, keep: bool, mail: Mail | None
    ) -> tuple[Tensor, Saved]:
        o = torch.empty_like(call.inputs.v)
        call.launch("forward", _heads(call), o, (None, None), passing=_given(entering, mail, maps, entering))
        return o, (entering,) if keep else ()

    def added_back(self, call: KDACall, saved: Saved, do: Tensor, mailed: bool) -> tuple[Tensor, Tensor | None]:
        found, further = _room(call), (do, *(None,) * 5)
        forgets = call.new(*found.shape[:3], dtype=torch.int32) if mailed else None
        passing = Passing(found, maps=True, zero=forgets)
        call.launch("backward", _heads(call), None, (None, None), (None, None), further, passing)
        return found, forgets

    def prepared(self, call: KDACall, saved: Saved) -> Chunks:
        H = len(_heads(call))
        if kda_launches.group(call.chunks, H) < H:
            return None
        (before,), ((heads, room),) = saved, kda_launches.by_group(call)
        call.launch("states", heads, None, (None, None), room, passing=_given(before))
        return room

    def gradients(
        self, call: KDACall, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        mail: Mail | None,
    ) -> Inputs:  # fmt: skip
        to = kda_launches.results(call)
        further = (do, *to.qkv, to.g, to.beta)
        (before,) = saved
        for heads, kept in kda_launches.by_group(call) if prepared is None else [(_heads(call), prepared)]:
            if prepared is None:
                call.launch("states", heads, None, (None, None), kept, passing=_given(before, mail, maps, entering))
            call.launch("backward", heads, None, (None, None), kept, further, _given(entering))
        return by_key_head(to, call.inputs.q.shape[2])


DELTA, KDA = DeltaSpans(), KDASpans()
