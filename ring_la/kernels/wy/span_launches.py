"""What the launches of rules share whose kernels go over spans of a head's tokens (`gdn_launches`, `gla_launches`,
`dplr_launches`): a forward, and gradients from what that left of chunks, or makes again some heads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.table import SAVED_STATES
from ring_la.kernels.wy.passing import Passing
from ring_la.kernels.wy.span_call import CHUNK, HEAD, SpanCall, by_row, chunk_count

KEPT = 3 * SAVED_STATES
"""Bytes that a call's chunks leave for its backward, or a backward holds at a time: 4 % of the smallest Hopper GPU's
memory. Not a share of what is free, which the host would wait for and which changes from call to call."""
Call = TypeVar("Call", bound=SpanCall)
Kept = TypeVar("Kept")
States = tuple[Tensor | None, Tensor | None]
"""Those that a launch begins with and those it ends with (gradients, backward)."""


class KeptChunks(NamedTuple):
    """What a backward of rules with writes wants of chunks: the states before them, W (U by beta; DPLR: Y) and their
    pairs."""

    states: Tensor
    writes: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, saved: tuple[Tensor | None, ...]) -> KeptChunks | None:
        """What a forward in one launch left, if it did; one in chunks leaves more, and others."""
        states, writes, pairs = saved if len(saved) == 3 else (None, None, None)
        return None if states is None or writes is None or pairs is None else cls(states, writes, pairs)


def heads_at_a_time(chunks: int, heads: int, numbers: int) -> int:
    """How many heads' chunks, each of which leaves so many numbers of 16 bits, `KEPT` bytes hold: groups of about one
    size."""
    return cdiv(heads, math.ceil(heads / max(1, KEPT // (chunks * 2 * numbers))))


@dataclass(frozen=True)
class SpanLaunches(Generic[Call, Kept]):
    """The launches of one rule.

    Attributes:
        call: inputs, offsets and scale as its kernels take them.
        room: for what a backward wants of chunks, of so many heads.
        group: of so many chunks and heads, how many heads' chunks are held at a time.
        run: the forward over some heads: o or None, states, and what it leaves of chunks or None.
        back: the backward over some heads: states, what the forward left, the gradient of o, and room for the inputs'.
        results: that room. q's and k's have the heads of v.
    """

    call: Callable[[Inputs, Tensor | None, float], Call]
    room: Callable[[Call, int], Kept]
    group: Callable[[int, int], int]
    run: Callable[[Call, range, Tensor | None, States, Kept | None], None]
    back: Callable[[Call, range, States, Kept, Tensor, Inputs], None]
    results: Callable[[Call], Inputs]

    def keeps(self, inputs: Inputs, cu: Tensor | None) -> bool:
        """Whether a forward leaves what a backward wants, or that makes it again."""
        B, T, H = inputs.v.shape[:3]
        return self.group(chunk_count(B, T, cu, CHUNK), H) == H

    def forward(
        self, inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Kept | None]:
        """o ``[B, T, H, V]``; if `final` the states that leave the pieces ``[B, N, H, K, V]``, `S0` like those; if
        `keep` what `gradients` take."""
        H, call = inputs.v.shape[2], self.call(inputs, cu, scale)
        o, leaving = torch.empty_like(call.inputs.v), call.states() if final else None
        kept = self.room(call, H) if keep else None
        self.run(call, range(H), o, (None if S0 is None else aligned(S0), leaving), kept)
        return o, None if leaving is None else by_row(leaving, inputs.v.shape[0]), kept

    def gradients(
        self, inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, do: Tensor, dS_end: Tensor | None,
        kept: Kept | None,
    ) -> tuple[Inputs, Tensor]:  # fmt: skip
        """Those of the inputs, and of the states that enter. `kept`: what `forward` left of the same tokens; None: it
        is made again, as many heads at a time as `KEPT` bytes hold."""
        B, _, H, _ = inputs.v.shape
        call = self.call(inputs, cu, scale)
        do = aligned(do.to(torch.bfloat16))
        S0, dS_end = (None if x is None else aligned(x.to(torch.float32)) for x in (S0, dS_end))
        found, dS0 = self.results(call), call.states()
        each = H if kept is not None else self.group(call.chunks, H)
        room = self.room(call, each) if kept is None else kept
        for first in range(0, H, each):
            heads = range(first, min(first + each, H))
            if kept is None:
                self.run(call, heads, None, (S0, None), room)
            self.back(call, heads, (dS_end, dS0), room, do, found)
        return by_key_head(found, inputs.q.shape[2]), by_row(dS0, B)


def launch(
    call: SpanCall, kernel: CudaKernel, heads: range, read: tuple[Tensor | None, ...], o: Tensor | None, states: States,
    kept: tuple[Tensor | None, ...], numbers: tuple[int, ...], further: tuple[Tensor | None, ...] = (),
    passing: Passing | None = None,
) -> None:  # fmt: skip
    """A kernel, whose spans wait by flags unless `passing` says otherwise. `read`: what it reads beside q, k and v;
    `kept` and `numbers`: its own."""
    x, device = call.inputs, call.inputs.v.device
    (_, T, H, _), programs = x.v.shape, call.count * len(heads)
    table = None if call.runs is None else call.runs.table
    passing = Passing(call.new(call.count, H, HEAD, HEAD)) if passing is None else passing
    flags = None
    if passing.waits:
        flags = torch.zeros(2 * call.count * H + 3 + programs, dtype=torch.int32, device=device)
    kernel(
        programs, *x.qkv, *read, o, *states, table, call.cu, flags, passing.states, *kept,
        T, H, x.q.shape[2], call.count, call.length, call.pieces, heads.start, len(heads), *numbers, call.scale,
        *further,
    )  # fmt: skip
