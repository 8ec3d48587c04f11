"""A split recurrence whose states pass from chunk to chunk in the order of each document (`kernels.in_order`).

A rank waits for the state that enters its tokens and sends on the one that leaves them; within its tokens all documents
go together, and what needs no state is done for all chunks at once. Its bits do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..blockwise import at_once, fixed
from ..context import ShardedLayout
from ..kernels import Backward, Inputs, state_dtype
from ..kernels.protocol import InputGradients
from ..scan import Chain
from .exchange import SplitCall
from .states import entering_states, states_shape

if TYPE_CHECKING:
    from ..kernels.in_order import Pieces


class OwnStretch(NamedTuple):
    """Consecutive tokens of this rank that are consecutive in the sequence.

    Attributes:
        start, stop: which of its tokens. pieces: each document's part in them.
        first, last: of each part, the local piece that a state enters by, and the one it leaves by.
        source, target: the ranks that its first state comes from and its last one goes to; None: nobody.
    """

    start: int
    stop: int
    pieces: Pieces
    first: Tensor
    last: Tensor
    source: int | None
    target: int | None


def goes_in_order(call: SplitCall, inputs: Inputs) -> bool:
    """Whether a call goes this way: the same on all ranks."""
    if not fixed(call.layout) or not at_once(inputs.v) or call.backend == "torch":
        return False
    from ..kernels.in_order import reason_against  # needs Triton

    return not reason_against(call.rule, inputs, call.layout.seq_len)


def stretches(layout: ShardedLayout) -> tuple[OwnStretch, ...]:
    """Those of this rank, in the order of the sequence; made once."""
    return layout.kept(stretches, lambda: tuple(_made(layout)))


def _made(layout: ShardedLayout) -> list[OwnStretch]:
    from ..kernels.in_order import Pieces  # needs Triton

    chain, out = Chain.of(layout), []
    runs: list[list[int]] = []
    for s in layout.local_segments():
        together = runs and runs[-1][-1] == s - 1
        runs[-1].append(s) if together else runs.append([s])
    pieces = [p for run in runs for s in run for p in layout.pieces_of(s)]
    assert len(pieces) == len(layout.pieces)
    at = piece = 0
    for run in runs:
        parts: list[list[int]] = []  # first piece, last piece, tokens
        document = None
        for p in (p for s in run for p in layout.pieces_of(s)):
            if p.document == document:
                parts[-1][1:] = [piece, parts[-1][2] + len(p)]
            else:
                parts.append([piece, piece, len(p)])
            piece, document = piece + 1, p.document
        first, last, sizes = (torch.tensor(x, dtype=torch.int64, device=layout.cp.device) for x in zip(*parts))
        cu = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
        stop = at + sum(p[2] for p in parts)
        source = chain.owners[run[0] - 1] if chain.needs[run[0]] else None
        target = chain.owners[run[-1] + 1] if chain.feeds(run[-1]) else None
        out.append(OwnStretch(at, stop, Pieces.of(stop - at, cu), first, last, source, target))
        at = stop
    return out


def _cut(inputs: Inputs, of: OwnStretch) -> Inputs:
    return Inputs(*(None if t is None else t[:, of.start : of.stop].contiguous() for t in inputs))


def outputs_in_order(
    call: SplitCall, initial_state: Tensor | None, inputs: Inputs
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """o, the states that leave this rank's pieces ``[B, pieces, H, K, V]``, and what the gradients take, alike many of
    each stretch."""
    from ..kernels.in_order import forward

    layout, S0 = call.layout, entering_states(call.layout, inputs, initial_state)
    shape, dtype = states_shape(layout, inputs), state_dtype(*inputs)
    S0 = inputs.q.new_zeros(shape, dtype=dtype) if S0 is None else S0
    leaving, outs, saved, sends = torch.zeros_like(S0), [], [], []
    for of in stretches(layout):
        S = S0.index_select(1, of.first)
        if of.source is not None:
            S[:, 0] = layout.cp.comm.recv(S[:, 0].shape, dtype, S.device, of.source).wait()
        out = forward(call.rule, _cut(inputs, of), of.pieces, call.scale, S, call.saves)
        assert out.leaving is not None
        if of.target is not None:
            sends.append(layout.cp.comm.send(out.leaving[:, -1].contiguous(), of.target))
        leaving.index_copy_(1, of.last, out.leaving.to(dtype))
        outs.append(out.o)
        saved += [S, *out.saved]
    for message in sends:
        message.wait()
    o = torch.cat(outs, 1) if outs else torch.empty_like(inputs.v)
    return o, leaving, saved


def gradients_in_order(
    call: SplitCall, inputs: Inputs, do: Tensor, dS_end: Tensor | None, saved: Sequence[Tensor | None]
) -> InputGradients:
    """The gradients of this rank's inputs, and of the states that enter its pieces, given those of o and of the states
    that leave (None: zero)."""
    from ..kernels.in_order import gradients

    layout, dtype = call.layout, state_dtype(*inputs)
    ends = inputs.q.new_zeros(states_shape(layout, inputs), dtype=dtype) if dS_end is None else dS_end
    entering, all_ = torch.zeros_like(ends), stretches(layout)
    found: list[Inputs] = []
    sends, each = [], len(saved) // max(1, len(all_))
    for n, of in reversed([*enumerate(all_)]):
        dS = ends.index_select(1, of.last)
        if of.target is not None:
            dS[:, -1] = layout.cp.comm.recv(dS[:, -1].shape, dtype, dS.device, of.target).wait()
        S, *kept = saved[n * each : (n + 1) * each]
        backward = Backward(S, do[:, of.start : of.stop].contiguous(), tuple(kept))
        grads = gradients(call.rule, _cut(inputs, of), of.pieces, call.scale, backward, dS)
        assert grads.entering is not None
        if of.source is not None:
            sends.append(layout.cp.comm.send(grads.entering[:, 0].contiguous(), of.source))
        entering.index_copy_(1, of.first, grads.entering.to(dtype))
        found.append(grads.inputs)
    for message in sends:
        message.wait()
    if not found:
        return InputGradients(Inputs(*(None if t is None else torch.zeros_like(t) for t in inputs)), entering)
    parts = zip(*reversed(found))
    joined = (
        None if p[0] is None else p[0] if len(p) == 1 else torch.cat([t for t in p if t is not None], 1) for p in parts
    )
    return InputGradients(Inputs(*joined), entering)
