"""Launches of KDA's kernels in CUDA C++ on Hopper (`kda_forward.cu`, `kda_backward.cu`): one forward, and backward two,
that of chunks' states and that of gradients. Each is two where spans that wait are left to a second (`KDACall.ahead`).

Chunks have 16 tokens, over which gates of at least -5 leave all factors within fp32. The backward makes the states
before the chunks again, as many heads at a time as `KEPT` bytes hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ring_la.kernels import gpu
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.zeros import zeros
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.table import SAVED_STATES
from ring_la.kernels.wy.passing import MAIL, Passing
from ring_la.kernels.wy.span_call import HEAD, Cut, SpanCall, by_row, chunk_count, side_by_side

CHUNK = 16
"""Tokens a chunk."""
LEAST = -82.0 / CHUNK
"""The lowest bound of a gate with which a chunk's factors fit."""
SPAN = 64
"""Tokens a span at least: those of another span that one may begin with are two chunks."""
SLOTS = 8
"""Chunks under way in a program. A first span goes over its first ones again if it has so many."""
SHORTER = 2
"""Chunks that a first span leaves to others where states meet those of other ranks and no gradients follow, since its
first ones are gone over again. Where they follow, all spans are alike, as backward has it."""
BESIDE, LEFT = 32, 4
"""Programs beside those of spans, which see to states that leave and come, at most; multiprocessors left for them."""
SPANS, TOKENS = 4, 8192
"""Of a piece, from which on spans that wait are left to a launch of their own, in which they go over their tokens
before the state that enters is there."""
KEPT = 5 * SAVED_STATES // 4
"""Bytes of chunks' states that a backward holds at a time."""
ARGUMENTS = "17Q12if4x"
SHARED = 232448


@functools.cache
def kernel(
    name: str, *defines: str, leaves: bool = False, deferred: bool = False, maps: bool = False, early: bool = False,
    mailed: bool = False,
) -> CudaKernel:  # fmt: skip
    """`forward`, `states` (what the backward needs of every chunk) or `backward`. One that `leaves` does so with spans
    that wait, which a `deferred` one then goes over; `maps`: it finds spans' maps alone; `early`: it follows the launch
    of its flags, or (maps that are `mailed`) of chunks' states; `mailed`: see `Passing`."""
    flags = dict(LEAVES=leaves, DEFERRED=deferred, MAPS=maps, MAILED=mailed)
    folder, defines = Path(__file__).parent, (*defines, *(f"{flag}={int(x)}" for flag, x in flags.items()))
    arguments = ARGUMENTS + MAIL * mailed
    if name == "backward":
        return CudaKernel(folder / "kda_backward.cu", "kda_backward", arguments + "6Q", 384, SHARED, defines, early)
    keep = f"KEEP={int(name == 'states')}"
    return CudaKernel(folder / "kda_forward.cu", "kda_forward", arguments, 512, SHARED, (*defines, keep), early)


def cut(at_a_time: int, train: bool | None = None) -> Cut:
    """How tokens are cut for launches over so many heads. `train`: states meet those of other ranks, and whether
    gradients follow."""

    def of(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
        left = 0 if train is None else LEFT
        wanted = max(1, (programs - left) // (at_a_time * pieces))
        length = max(SPAN, cdiv(cdiv(tokens, pieces * wanted), CHUNK) * CHUNK)
        each = tokens // pieces
        spans = cdiv(each, length)
        if not equal or train is not False or spans < 2 or length < (SLOTS + SHORTER) * CHUNK:
            return length, length
        outer = length - SHORTER * CHUNK
        return cdiv(cdiv(each - outer, CHUNK), spans - 1) * CHUNK, outer

    return of


class KDACall(SpanCall):
    """One device's tokens, as KDA's kernels take them."""

    chunk: ClassVar[int] = CHUNK

    @property
    def defines(self) -> tuple[str, str]:
        read = ("GATE", self.inputs.g), ("BETA", self.inputs.beta)
        gate, step = (f"{name}_BF16={int(x.dtype == torch.bfloat16)}" for name, x in read)
        return gate, step

    @property
    def ahead(self) -> bool:
        """Whether spans that wait are left to a launch of their own."""
        each = self.inputs.v.shape[0] * self.inputs.v.shape[1] // self.pieces
        return each >= max(SPANS * self.length, TOKENS)

    def launch(
        self, name: str, heads: range, o: Tensor | None, states: tuple[Tensor | None, Tensor | None],
        kept: tuple[Tensor, Tensor] | tuple[None, None] = (None, None), further: tuple[Tensor | None, ...] = (),
        passing: Passing | None = None,
    ) -> None:  # fmt: skip
        """A kernel over some heads. `states`: those it begins with and those it ends with (gradients, backward)."""
        H, count, x = self.inputs.v.shape[2], self.count, self.inputs
        ahead = self.ahead and passing is None
        passing = Passing(self.new(count, H, HEAD, HEAD)) if passing is None else passing
        waits, flags = passing.waits, passing.zero
        flags = zeros(2 * count * H + 2, x.v.device) if waits else flags
        programs = count * len(heads)
        mailed = bool(passing.mail)
        helping = beside(self, H) if mailed and (name == "forward" or passing.maps) else 0
        arguments: Any = (
            programs + helping, *x.qkv, x.g, x.beta, o, *states, self.runs and self.runs.table, self.cu, flags,
            passing.states, passing.parts, passing.squares, passing.arrived, *kept, x.v.shape[1], H,
            x.q.shape[2], count, self.length, self.pieces, heads.start, len(heads), passing.given,
            side_by_side(programs, x.v.device), self.outer, count // self.pieces, self.scale, *passing.mail,
            *further,
        )  # fmt: skip
        early = waits or (mailed and (name == "forward" or passing.maps))  # beside the launch before
        kernel(name, *self.defines, leaves=ahead, maps=passing.maps, early=early, mailed=mailed)(*arguments)
        if ahead:
            kernel(name, *self.defines, deferred=True)(*arguments)


def beside(call: KDACall, heads: int) -> int:
    """Programs that see to states that leave pieces and come, beside those of spans: on what multiprocessors are left,
    if all run at once."""
    left = gpu.multiprocessors(call.inputs.v.device) - call.count * heads
    return max(0, min(BESIDE, call.pieces * heads, left))


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, H, V]``, and if `final` the states that leave the pieces ``[B, N, H, K, V]``; `S0` like those."""
    H = inputs.v.shape[2]
    call = KDACall.of(inputs, cu, scale, cut(H))
    o = torch.empty_like(call.inputs.v)
    leaving = call.states() if final else None
    call.launch("forward", range(H), o, (None if S0 is None else aligned(S0), leaving))
    return o, None if leaving is None else by_row(leaving, inputs.v.shape[0])


def gradients(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, do: Tensor, dS_end: Tensor | None
) -> tuple[Inputs, Tensor]:
    """Those of the inputs, and of the states that enter."""
    B, T, H, _ = inputs.v.shape
    each = group(chunk_count(B, T, cu, CHUNK), H)
    call = KDACall.of(inputs, cu, scale, cut(each))
    do = aligned(do.to(torch.bfloat16))
    S0, dS_end = (None if x is None else aligned(x.to(torch.float32)) for x in (S0, dS_end))
    found, dS0 = call.results(), call.states()
    for heads, kept in by_group(call):
        call.launch("states", heads, None, (S0, None), kept)
        call.launch("backward", heads, None, (dS_end, dS0), kept, (do, *found.qkv, found.g, found.beta))
    return by_key_head(found, inputs.q.shape[2]), by_row(dS0, B)


def by_group(call: KDACall) -> Iterator[tuple[range, tuple[Tensor, Tensor]]]:
    """Heads at a time, and room for what a backward takes of their chunks, the same for all."""
    H, bf16 = call.inputs.v.shape[2], torch.bfloat16
    each = group(call.chunks, H)
    states = call.new(call.chunks, each, HEAD, HEAD, dtype=bf16)
    writes = call.new(call.chunks, each, CHUNK, HEAD, dtype=bf16)
    for first in range(0, H, each):
        yield range(first, min(first + each, H)), (states, writes)


@functools.lru_cache(maxsize=512)
def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks' states the backward holds: groups of about one size."""
    most = max(1, KEPT // (chunks * HEAD * (HEAD + CHUNK) * 2))
    return cdiv(heads, math.ceil(heads / most))
