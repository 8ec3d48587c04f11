"""What the launches of rules share whose kernels go over spans of a head's tokens (`gdn_launches`, `gla_launches`,
`dplr_launches`): a forward, and gradients from what that left of chunks, or makes again some heads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.table import SAVED_STATES, cdiv
from ring_la.kernels.wy.kda_launches import by_row

CHUNK = 32
"""Tokens a chunk."""
KEPT = 3 * SAVED_STATES
"""Bytes that a call's chunks leave for its backward, or a backward holds at a time: 4 % of the smallest Hopper GPU's
memory. Not a share of what is free, which the host would wait for and which changes from call to call."""


class SpanCall(Protocol):
    """One device's tokens, as a rule's kernels take them."""

    @property
    def inputs(self) -> Inputs: ...
    @property
    def chunks(self) -> int: ...
    def states(self) -> Tensor: ...


Call = TypeVar("Call", bound=SpanCall)
Kept = TypeVar("Kept")
States = tuple[Tensor | None, Tensor | None]
"""Those that a launch begins with and those it ends with (gradients, backward)."""


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
        return self.group(B * cdiv(T, CHUNK) if cu is None else T // CHUNK + cu.numel() - 1, H) == H

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
