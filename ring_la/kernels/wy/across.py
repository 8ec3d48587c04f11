"""What the launches in CUDA C++ on Hopper do where states meet those of other ranks (see `scanned_spans`): a launch
finds what spans do to a state, another goes over all spans at once, each from what enters it, and backward the same.
GLA's never carry states themselves.

What the maps' launches leave out (see `maps.cuh`) the others do not ask for: both decide alike, by the same bound, or
by what the forward has found.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs, Mail, SpanMaps
from ring_la.kernels.runtime.zeros import clear
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy import gdn_launches, gla_launches, kda_launches
from ring_la.kernels.wy.gdn_launches import GDNCall
from ring_la.kernels.wy.gla_launches import KeptPairs
from ring_la.kernels.wy.kda_launches import KDACall
from ring_la.kernels.wy.passing import Passing
from ring_la.kernels.wy.span_call import HEAD, SpanCall, chunk_count
from ring_la.kernels.wy.span_launches import KeptChunks

Saved = tuple[Tensor | None, ...]


Chunks = tuple[Tensor, Tensor] | None
"""What KDA's backward takes of chunks, where it is there."""


class Cut(NamedTuple):
    """A call as a rule's kernels take it, and its spans; of rows that are cut evenly those of one row."""

    call: Any
    spans: Runs


class Carried(NamedTuple):
    """What launches take that find what enters spans themselves, and exchange states with other ranks (`mail.cuh`).

    Attributes:
        mail: the mailboxes. before: what enters pieces ``[B, N, H, K, V]`` where no rank sends it; None: zero.
        entering: room for what enters the spans ``[B, NS, H, K, V]``. leaving: for what leaves the pieces.
        keeps: whether that is wanted. composes: whether what spans together do is found before anything comes:
            ranks that train wait for each other. arrived: int32 ``[2, B, NS, H]``, what the launches say to each other.
    """

    mail: Mail
    before: Tensor | None
    entering: Tensor
    leaving: Tensor
    keeps: bool
    composes: bool
    arrived: Tensor

    def given(self, states: Tensor, maps: SpanMaps) -> Passing:
        """Spans of those `maps`, or (KDA's forward) that find them, which begin from `states` where they know them."""
        memory, numbers = self.mail
        found = maps.own, maps.squares, maps.image, maps.zero
        states_of = self.before, self.entering, self.leaving
        mail = (*memory, *found, *states_of, *numbers, int(self.keeps), int(self.composes))
        return Passing(states, maps.transition, given=True, arrived=self.arrived, mail=mail)


MOST = 64
"""Spans of a piece that they carry states through."""


class SpanKernels(Protocol):
    """A rule's launches. States are those of spans ``[B, NS, H, K, V]``.

    Attributes:
        left: how many tensors `output` leaves for the gradients.
    """

    left: ClassVar[int]

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        """The call, which gradients follow if it is to `train`; all of its spans have one length then."""
        ...

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        """Whether there is room for what gradients take."""
        ...

    def carries(self, call: Any, back: bool) -> bool:
        """Whether they find what enters the spans of one piece a row themselves, and exchange states."""
        ...

    def maps(self, call: Any, train: bool, arrived: Tensor | None) -> SpanMaps:
        """What each span does to the state that enters it; `train`: gradients follow; `arrived` is cleared. Room for it
        where states are carried and `output` finds that itself."""
        ...

    def output(
        self, call: Any, entering: Tensor, maps: SpanMaps, keep: bool, carried: Carried | None
    ) -> tuple[Tensor, Saved]:
        """o, and if `keep` what the gradients take, of the states that enter the spans, or are `carried` to them."""
        ...

    def prepared(self, call: Any, maps: SpanMaps, saved: Saved, carried: Carried | None) -> Chunks:
        """What the gradients take that needs no gradient of a state, and `saved` lacks; None: nothing, or later. Of
        `maps` only what does not change from forward to backward is there."""
        ...

    def add_back(self, call: Any, maps: SpanMaps, saved: Saved, do: Tensor, carried: Carried | None) -> None:
        """Fill `maps.own`: what each span adds to the gradient of the state that enters it. What is said between the
        launches that carry states is cleared."""
        ...

    def gradients(
        self, call: Any, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        carried: Carried | None,
    ) -> Inputs:  # fmt: skip
        """Those of the inputs, of the gradients of the states that leave the spans, or are `carried` to them."""
        ...


def _cut(call: SpanCall) -> Cut:
    each = call.count // call.inputs.v.shape[0]
    return Cut(call, Runs(call.length, call.chunk, each, 1, None, None) if call.runs is None else call.runs)


def _heads(call: SpanCall) -> range:
    return range(call.inputs.v.shape[2])


def _room(call: SpanCall) -> Tensor:
    """For a state of every span, or its transition."""
    B, _, H, _ = call.inputs.v.shape
    return call.new(B, call.count // B, H, HEAD, HEAD)


def _images(call: SpanCall) -> Tensor:
    """Room for images of transitions."""
    B, _, H, _ = call.inputs.v.shape
    return call.new(B, call.count // B, H, 2, HEAD, HEAD, dtype=torch.bfloat16)


def _maps(call: SpanCall, arrived: Tensor | None, ways: int = 1) -> tuple[SpanMaps, Passing]:
    """Room for those, and a launch's part of it; images where states are carried. `ways`: on how many it is kept which
    spans forget."""
    B, _, H, _ = call.inputs.v.shape
    spans = B, call.count // B, H
    zero, squares = call.new(*(ways,) * (ways > 1), *spans, dtype=torch.int32), call.new(*spans, 8)
    found = SpanMaps("dense", _room(call), _room(call), True, zero, squares)
    if arrived is not None:
        found = found._replace(image=_images(call))
    of_maps: Any = dict(zero=zero, squares=squares, image=found.image, arrived=arrived)
    return found, Passing(found.own, found.transition, maps=True, **of_maps)


def _given(states: Tensor, maps: SpanMaps, carried: Carried | None) -> Passing:
    """The state that every span begins from, as far as it is not `carried` there under `maps`."""
    return Passing(states, given=True) if carried is None else carried.given(states, maps)


def _few(call: SpanCall) -> bool:
    """Whether a row has no more spans than states are carried through."""
    return call.runs is None and call.count // call.inputs.v.shape[0] <= MOST


class DeltaSpans:
    """The delta rule's and the gated delta rule's."""

    left: ClassVar[int] = 3

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        cut = gdn_launches.across if train else gdn_launches.carrying
        return _cut(GDNCall.of(inputs, cu, scale, cut))

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return gdn_launches.keeps(inputs, cu)

    def carries(self, call: GDNCall, back: bool) -> bool:
        return _few(call)

    def maps(self, call: GDNCall, train: bool, arrived: Tensor | None) -> SpanMaps:
        found, passing = _maps(call, arrived)
        halves = gdn_launches.halves(call)
        if halves > 1:
            found = found._replace(half=_images(call) if train else None)
            passing = passing._replace(half=found.half, extra=_room(call), together=halves)
        kernel = partial(gdn_launches.forward_kernel, False, *call.defines, maps=True)
        call.launch(kernel, _heads(call), None, (None, None), (None,) * 3, passing=passing)
        return found

    def output(
        self, call: GDNCall, entering: Tensor, maps: SpanMaps, keep: bool, carried: Carried | None
    ) -> tuple[Tensor, Saved]:
        o, heads = torch.empty_like(call.inputs.v), _heads(call)
        kept = gdn_launches.room(call, len(heads)) if keep else (None,) * 3
        kernel = partial(gdn_launches.forward_kernel, keep, *call.defines)
        call.launch(kernel, heads, o, (None, None), kept, passing=_given(entering, maps, carried))
        return o, tuple(kept) if keep else ()

    def prepared(self, call: GDNCall, maps: SpanMaps, saved: Saved, carried: Carried | None) -> Chunks:
        return None

    def add_back(self, call: GDNCall, maps: SpanMaps, saved: Saved, do: Tensor, carried: Carried | None) -> None:
        states, writes, pairs = saved
        arrived = None if carried is None else carried.arrived
        kernel = partial(gdn_launches.backward_kernel, *call.defines, maps=True)
        passing = Passing(maps.own, maps=True, zero=maps.zero, arrived=arrived)
        if maps.half is not None:
            passing = passing._replace(half=maps.half, extra=_room(call), together=2)
        kept, further = KeptChunks(states, writes, pairs), (do, *(None,) * 5)
        call.launch(kernel, _heads(call), None, (None, None), kept, further, passing)

    def gradients(
        self, call: GDNCall, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        carried: Carried | None,
    ) -> Inputs:  # fmt: skip
        to, (states, writes, pairs) = call.results(), saved
        kept, further = KeptChunks(states, writes, pairs), (do, *to.qkv, to.g, to.beta)
        kernel = partial(gdn_launches.backward_kernel, *call.defines)
        passing = _given(entering, maps, carried)
        call.launch(kernel, _heads(call), None, (None, None), kept, further, passing)
        return by_key_head(to, call.inputs.q.shape[2])


class KDASpans:
    """KDA's by a bounded gate. What is kept is what enters the spans, from which the backward makes chunks' states."""

    left: ClassVar[int] = 1

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        B, T, H = inputs.v.shape[:3]
        chunks = chunk_count(B, T, cu, kda_launches.CHUNK)
        heads = kda_launches.group(chunks, H) if train else H  # of one launch
        return _cut(KDACall.of(inputs, cu, scale, kda_launches.cut(heads, train)))

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return True

    def carries(self, call: KDACall, back: bool) -> bool:
        H = len(_heads(call))  # in groups, a launch would send behind others' states and gradients
        return _few(call) and kda_launches.beside(call, H) > 0 and (not back or kda_launches.group(call.chunks, H) == H)

    def maps(self, call: KDACall, train: bool, arrived: Tensor | None) -> SpanMaps:
        found, passing = _maps(call, arrived, ways=1 if arrived is None else 2)
        if arrived is None:
            call.launch("forward", _heads(call), None, (None, None), passing=passing)
        else:  # `output` finds them
            clear(arrived)
        return found

    def output(
        self, call: KDACall, entering: Tensor, maps: SpanMaps, keep: bool, carried: Carried | None
    ) -> tuple[Tensor, Saved]:
        o = torch.empty_like(call.inputs.v)
        call.launch("forward", _heads(call), o, (None, None), passing=_given(entering, maps, carried))
        return o, (entering,) if keep else ()

    def prepared(self, call: KDACall, maps: SpanMaps, saved: Saved, carried: Carried | None) -> Chunks:
        H = len(_heads(call))
        if kda_launches.group(call.chunks, H) < H:
            return None
        (before,), ((heads, room),) = saved, kda_launches.by_group(call)
        call.launch("states", heads, None, (None, None), room, passing=_given(before, maps, carried))
        return room

    def add_back(self, call: KDACall, maps: SpanMaps, saved: Saved, do: Tensor, carried: Carried | None) -> None:
        passing = Passing(maps.own) if carried is None else carried.given(maps.own, maps)
        passing, further = passing._replace(given=False, maps=True), (do, *(None,) * 5)
        call.launch("backward", _heads(call), None, (None, None), (None, None), further, passing)

    def gradients(
        self, call: KDACall, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        carried: Carried | None,
    ) -> Inputs:  # fmt: skip
        to = call.results()
        further = (do, *to.qkv, to.g, to.beta)
        (before,) = saved
        for heads, kept in kda_launches.by_group(call) if prepared is None else [(_heads(call), prepared)]:
            if prepared is None:
                call.launch("states", heads, None, (None, None), kept, passing=Passing(before, given=True))
            passing = _given(entering, maps, carried)
            call.launch("backward", heads, None, (None, None), kept, further, passing)
        return by_key_head(to, call.inputs.q.shape[2])


class GLASpans:
    """GLA's, whose transitions are decays by key channel, as log2 ``[B, NS, H, K]``."""

    left: ClassVar[int] = 2

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        return _cut(SpanCall.of(inputs, cu, scale, gdn_launches.across))

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return gla_launches.keeps(inputs, cu)

    def carries(self, call: SpanCall, back: bool) -> bool:
        return False

    def maps(self, call: SpanCall, train: bool, arrived: Tensor | None) -> SpanMaps:
        B, _, H, _ = call.inputs.v.shape
        found = SpanMaps("diagonal", _room(call), call.new(B, call.count // B, H, HEAD), True)
        passing = Passing(found.own, found.transition, maps=True)
        gla_launches.run(call, _heads(call), None, (None, None), None, passing)
        return found

    def output(
        self, call: SpanCall, entering: Tensor, maps: SpanMaps, keep: bool, carried: Carried | None
    ) -> tuple[Tensor, Saved]:
        o, heads = torch.empty_like(call.inputs.v), _heads(call)
        kept = gla_launches.room(call, len(heads)) if keep else None
        gla_launches.run(call, heads, o, (None, None), kept, Passing(entering, given=True))
        return o, () if kept is None else tuple(kept)

    def prepared(self, call: SpanCall, maps: SpanMaps, saved: Saved, carried: Carried | None) -> Chunks:
        return None

    def add_back(self, call: SpanCall, maps: SpanMaps, saved: Saved, do: Tensor, carried: Carried | None) -> None:
        kept, passing = KeptPairs(*saved), Passing(maps.own, maps=True)
        gla_launches.back(call, _heads(call), (None, None), kept, do, None, passing)

    def gradients(
        self, call: SpanCall, entering: Tensor, maps: SpanMaps, saved: Saved, do: Tensor, prepared: Chunks,
        carried: Carried | None,
    ) -> Inputs:  # fmt: skip
        to, kept = gla_launches.results(call), KeptPairs(*saved)
        gla_launches.back(call, _heads(call), (None, None), kept, do, to, Passing(entering, given=True))
        return by_key_head(to, call.inputs.q.shape[2])


DELTA, KDA, GLA = DeltaSpans(), KDASpans(), GLASpans()
