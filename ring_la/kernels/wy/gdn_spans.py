"""The delta rules' kernels on Hopper where states meet those of other ranks (`scanned_spans`): a launch finds what
spans do to a state, another goes over all spans at once, each from what enters it, and backward the same.

What the maps' launches leave out (see `gdn.cuh`) the others do not ask for: both decide alike, by the same bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs, SpanMaps
from ring_la.kernels.spans.heads import summed
from ring_la.kernels.wy import gdn_launches
from ring_la.kernels.wy.gdn_launches import GDNCall, KeptChunks, Passing
from ring_la.kernels.wy.kda_launches import HEAD


def call_of(inputs: Inputs, cu: Tensor | None, scale: float) -> GDNCall:
    """A call whose spans all have one length."""
    return GDNCall.of(inputs, cu, scale, gdn_launches.even)


def maps(call: GDNCall) -> SpanMaps:
    """What each span does to the state that enters it."""
    kernel, found = gdn_launches.forward_kernel(False, *call.defines, maps=True), _room(call)
    call.launch(kernel, _heads(call), None, (None, None), (None,) * 3, passing=Passing(found.own, found.transition))
    return found


def output(call: GDNCall, entering: Tensor, keep: bool) -> tuple[Tensor, KeptChunks | None]:
    """o, and if `keep` what the gradients take, of the states that enter the spans."""
    o, heads = torch.empty_like(call.inputs.v), _heads(call)
    kept = gdn_launches.room(call, len(heads)) if keep else None
    kernel = gdn_launches.forward_kernel(keep, *call.defines)
    call.launch(kernel, heads, o, (None, None), kept or (None,) * 3, passing=Passing(entering, given=True))
    return o, kept


def maps_back(call: GDNCall, kept: KeptChunks, do: Tensor) -> SpanMaps:
    """What each span adds to the gradient of the state that enters it, and transitions as those of `maps`."""
    kernel, found = gdn_launches.backward_kernel(*call.defines, maps=True), _room(call)
    further = (do, *(None,) * 5)
    call.launch(kernel, _heads(call), None, (None, None), kept, further, Passing(found.own, found.transition))
    return found


def gradients(call: GDNCall, entering: Tensor, kept: KeptChunks, do: Tensor) -> Inputs:
    """Those of the inputs, of the gradients of the states that leave the spans."""
    kernel, to, HK = gdn_launches.backward_kernel(*call.defines), gdn_launches.results(call), call.inputs.q.shape[2]
    further = (do, *to.qkv, to.g, to.beta)
    call.launch(kernel, _heads(call), None, (None, None), kept, further, Passing(entering, given=True))
    if HK != call.inputs.v.shape[2]:
        to = to._replace(q=summed(to.q, HK, to.q.dtype), k=summed(to.k, HK, to.k.dtype))
    return to


def _heads(call: GDNCall) -> range:
    return range(call.inputs.v.shape[2])


def _room(call: GDNCall) -> SpanMaps:
    B, _, H, _ = call.inputs.v.shape
    own, transition = (call.new(B, call.count // B, H, HEAD, HEAD) for _ in range(2))
    return SpanMaps("dense", own, transition, True)
