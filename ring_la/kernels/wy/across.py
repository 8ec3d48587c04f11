"""What the launches in CUDA C++ on Hopper do where states meet those of other ranks (see `scanned_spans`): a launch
finds what spans do to a state, another goes over all spans at once, each from what enters it, and backward the same.

What the maps' launches leave out (see `maps.cuh`) the others do not ask for: both decide alike, by the same bound.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs, SpanMaps
from ring_la.kernels.spans.heads import summed
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy import gdn_launches, kda_launches
from ring_la.kernels.wy.gdn_launches import GDNCall, KeptChunks
from ring_la.kernels.wy.kda_launches import HEAD, KDACall, Passing

Saved = tuple[Tensor | None, ...]


Chunks = tuple[Tensor, Tensor] | None
"""What KDA's backward takes of chunks, where it is there."""


class Cut(NamedTuple):
    """A call as a rule's kernels take it, and the spans of its maps; of rows that are cut evenly those of one row."""

    call: Any
    spans: Runs


class DeltaCall(NamedTuple):
    """A call's spans, and those that its maps are found of: `finer` of them are one."""

    call: GDNCall
    maps: GDNCall
    finer: int

    @property
    def inputs(self) -> Inputs:
        return self.call.inputs


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

    def maps(self, call: Any) -> SpanMaps:
        """What each span does to the state that enters it."""
        ...

    def output(self, call: Any, entering: Tensor, keep: bool) -> tuple[Tensor, Saved]:
        """o, and if `keep` what the gradients take, of the states that enter the spans."""
        ...

    def added_back(self, call: Any, saved: Saved, do: Tensor) -> Tensor:
        """What each span adds to the gradient of the state that enters it."""
        ...

    def prepared(self, call: Any, saved: Saved) -> Chunks:
        """What the gradients take that needs no gradient of a state, and `saved` lacks; None: nothing, or later."""
        ...

    def gradients(self, call: Any, entering: Tensor, saved: Saved, do: Tensor, prepared: Chunks) -> Inputs:
        """Those of the inputs, of the gradients of the states that leave the spans."""
        ...


def _spans(call: GDNCall | KDACall, chunk: int) -> Runs:
    rows = call.inputs.v.shape[0]
    return Runs(call.length, chunk, call.count // rows, 1, None, None) if call.runs is None else call.runs


def _heads(call: GDNCall | KDACall) -> range:
    return range(call.inputs.v.shape[2])


def _room(call: GDNCall | KDACall) -> Tensor:
    """For a state of every span, or its transition."""
    B, _, H, _ = call.inputs.v.shape
    return call.new(B, call.count // B, H, HEAD, HEAD)


def _maps(call: GDNCall | KDACall) -> tuple[SpanMaps, Passing]:
    """Room for those, and a launch's part of it."""
    B, _, H, _ = call.inputs.v.shape
    found = SpanMaps("dense", _room(call), _room(call), True, call.new(B, call.count // B, H, dtype=torch.int32))
    return found, Passing(found.own, found.transition, maps=True, zero=found.zero)


def _by_key_head(call: GDNCall | KDACall, found: Inputs) -> Inputs:
    """Gradients of q and k summed over the value heads that share them."""
    H, HK = call.inputs.v.shape[2], call.inputs.q.shape[2]
    if H == HK:
        return found
    return found._replace(q=summed(found.q, HK, found.q.dtype), k=summed(found.k, HK, found.k.dtype))


class DeltaSpans:
    """The delta rule's and the gated delta rule's."""

    left: ClassVar[int] = 3

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        finer = 1

        def lengths(*of: Any) -> tuple[int, int]:
            nonlocal finer
            length, finer = gdn_launches.across(*of)
            return length, length

        call = maps = GDNCall.of(inputs, cu, scale, lengths)
        if finer > 1:
            length = call.length // finer
            maps = replace(call, length=length, outer=length, count=call.count * finer)
        return Cut(DeltaCall(call, maps, finer), _spans(maps, gdn_launches.CHUNK))

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return gdn_launches.keeps(inputs, cu)

    def maps(self, call: DeltaCall) -> SpanMaps:
        found, passing = _maps(call.maps)
        kernel = partial(gdn_launches.forward_kernel, False, *call.call.defines, maps=True)
        call.maps.launch(kernel, _heads(call.maps), None, (None, None), (None,) * 3, passing=passing)
        return found

    def output(self, call: DeltaCall, entering: Tensor, keep: bool) -> tuple[Tensor, Saved]:
        o, heads = torch.empty_like(call.inputs.v), _heads(call.call)
        kept = gdn_launches.room(call.call, len(heads)) if keep else (None,) * 3
        kernel = partial(gdn_launches.forward_kernel, keep, *call.call.defines)
        call.call.launch(kernel, heads, o, (None, None), kept, passing=Passing(entering, given=call.finer))
        return o, tuple(kept) if keep else ()

    def added_back(self, call: DeltaCall, saved: Saved, do: Tensor) -> Tensor:
        found, (states, writes, pairs) = _room(call.maps), saved
        kernel = partial(gdn_launches.backward_kernel, *call.call.defines, maps=True)
        passing = Passing(found, maps=True)
        kept, further = KeptChunks(states, writes, pairs), (do, *(None,) * 5)
        call.maps.launch(kernel, _heads(call.maps), None, (None, None), kept, further, passing)
        return found

    def prepared(self, call: DeltaCall, saved: Saved) -> Chunks:
        return None

    def gradients(self, call: DeltaCall, entering: Tensor, saved: Saved, do: Tensor, prepared: Chunks) -> Inputs:
        to, (states, writes, pairs) = gdn_launches.results(call.call), saved
        kept, further = KeptChunks(states, writes, pairs), (do, *to.qkv, to.g, to.beta)
        passing = Passing(entering, given=call.finer)
        kernel = partial(gdn_launches.backward_kernel, *call.call.defines)
        call.call.launch(kernel, _heads(call.call), None, (None, None), kept, further, passing)
        return _by_key_head(call.call, to)


class KDASpans:
    """KDA's by a bounded gate. What is kept is what enters the spans, from which the backward makes chunks' states."""

    left: ClassVar[int] = 1

    def cut(self, inputs: Inputs, cu: Tensor | None, scale: float, train: bool) -> Cut:
        B, T, H = inputs.v.shape[:3]
        heads = kda_launches.group(kda_launches.chunks(B, T, cu), H) if train else H  # of one launch
        call = KDACall.of(inputs, cu, scale, heads)
        return Cut(call, _spans(call, kda_launches.CHUNK))

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        return True

    def maps(self, call: KDACall) -> SpanMaps:
        found, passing = _maps(call)
        call.launch("forward", _heads(call), None, (None, None), passing=passing)
        return found

    def output(self, call: KDACall, entering: Tensor, keep: bool) -> tuple[Tensor, Saved]:
        o = torch.empty_like(call.inputs.v)
        call.launch("forward", _heads(call), o, (None, None), passing=Passing(entering, given=1))
        return o, (entering,) if keep else ()

    def added_back(self, call: KDACall, saved: Saved, do: Tensor) -> Tensor:
        found, further = _room(call), (do, *(None,) * 5)
        passing = Passing(found, maps=True)
        call.launch("backward", _heads(call), None, (None, None), (None, None), further, passing)
        return found

    def prepared(self, call: KDACall, saved: Saved) -> Chunks:
        H = len(_heads(call))
        if kda_launches.group(call.chunks, H) < H:
            return None
        ((heads, room),) = kda_launches.by_group(call)
        self._chunks(call, saved, heads, room)
        return room

    def gradients(self, call: KDACall, entering: Tensor, saved: Saved, do: Tensor, prepared: Chunks) -> Inputs:
        to = kda_launches.results(call)
        further = (do, *to.qkv, to.g, to.beta)
        for heads, kept in kda_launches.by_group(call) if prepared is None else [(_heads(call), prepared)]:
            if prepared is None:
                self._chunks(call, saved, heads, kept)
            call.launch("backward", heads, None, (None, None), kept, further, Passing(entering, given=1))
        return _by_key_head(call, to)

    def _chunks(self, call: KDACall, saved: Saved, heads: range, room: tuple[Tensor, Tensor]) -> None:
        """States before chunks and what these write, of some heads."""
        (before,) = saved
        call.launch("states", heads, None, (None, None), room, passing=Passing(before, given=1))


DELTA, KDA = DeltaSpans(), KDASpans()
