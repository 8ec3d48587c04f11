"""Launches of KDA's kernels in CUDA C++ on Hopper (`kda_forward.cu`, `kda_backward.cu`): one forward, two backward.

Chunks have 16 tokens, over which gates of at least -5 leave all factors within fp32. The backward makes the states
before the chunks again, as many heads at a time as `KEPT` bytes hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.zeros import zeros
from ring_la.kernels.spans.heads import by_key_head
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.spans.table import SAVED_STATES, cdiv

CHUNK, HEAD = 16, 128
"""Tokens a chunk, and channels of a head."""
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
ARGUMENTS, MAIL = "17Q12if4x", "4Q2q7Q9i4x"
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


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that run at a time: these kernels fill a multiprocessor each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def side_by_side(programs: int, device: torch.device) -> bool:
    """Whether they all run at once: none has to take its number in the order that they begin in."""
    return programs <= multiprocessors(device)


def as_read(inputs: Inputs) -> Inputs:
    """Inputs as these kernels read them: contiguous; q, k, a, b in the dtype of v, gates and steps in fp32 or bf16."""
    q, k, v, g, beta, a, b = (None if x is None else aligned(x) for x in inputs)
    q, k, a, b = (x if x is None or x.dtype == v.dtype else x.to(v.dtype) for x in (q, k, a, b))
    g, beta = (x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (g, beta))
    return Inputs(q, k, v, g, beta, a, b)


class Passing(NamedTuple):
    """What spans hand on, or (`given`) what enters each. Of a launch that finds `maps` what spans add, (`parts`) their
    transitions, their `image`, the sums of `squares` of these, and which transitions are `zero`; in parts, `together`
    of a span, images of the transitions of each first `half`, and `extra` room for what a part leaves. Of one whose
    spans wait what they combine, `together` at a time.

    `mail`: as `mail.cuh` has it, of a launch that carries states from span to span and rank to rank; `arrived`, int32,
    says which spans have what enters them, and is zero at first, by the launch before."""

    states: Tensor
    parts: Tensor | None = None
    together: int = 1
    given: bool = False
    maps: bool = False
    zero: Tensor | None = None
    squares: Tensor | None = None
    half: Tensor | None = None
    extra: Tensor | None = None
    image: Tensor | None = None
    arrived: Tensor | None = None
    mail: tuple[Tensor | int, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether spans may wait for each other, by flags that are zero at first."""
        return not self.given and not self.maps


@dataclass(frozen=True)
class KDACall:
    """One device's tokens, as the kernels take them.

    Attributes:
        inputs: q, k, v bf16, g and beta fp32 or bf16; contiguous, batch rows one behind the other.
        pieces: documents, or batch rows. runs: the spans of packed documents; None: rows are cut evenly, but for the
            first span, which has `outer` tokens, and the last one, which has what is left.
    """

    inputs: Inputs
    cu: Tensor | None
    scale: float
    pieces: int
    length: int
    outer: int
    count: int
    chunks: int
    runs: Runs | None

    @classmethod
    def of(cls, inputs: Inputs, cu: Tensor | None, scale: float, heads: int, train: bool | None = None) -> KDACall:
        """`heads`: of one launch. `train`: states meet those of other ranks, and whether gradients follow."""
        inputs = as_read(inputs)
        v = inputs.v
        B, T = v.shape[:2]
        pieces = B if cu is None else cu.numel() - 1
        left = 0 if train is None else LEFT
        wanted = max(1, (multiprocessors(v.device) - left) // (heads * pieces))
        length = max(SPAN, cdiv(cdiv(B * T, pieces * wanted), CHUNK) * CHUNK)
        if cu is None:
            spans, outer = cdiv(T, length), length
            if train is False and spans > 1 and length >= (SLOTS + SHORTER) * CHUNK:
                outer -= SHORTER * CHUNK
                length = cdiv(cdiv(T - outer, CHUNK), spans - 1) * CHUNK
                spans = 1 + cdiv(T - outer, length)
            return cls(inputs, None, scale, pieces, length, outer, B * spans, B * cdiv(T, CHUNK), None)
        cu = aligned(cu.to(device=v.device, dtype=torch.int32))
        runs = Runs.of(T, length, CHUNK, cu)
        return cls(inputs, cu, scale, pieces, length, length, runs.count, T // CHUNK + pieces, runs)

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

    def states(self) -> Tensor:
        """Room for the state of every piece."""
        return self.new(self.pieces, self.inputs.v.shape[2], HEAD, HEAD)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.inputs.v.device, dtype=dtype)

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
    left = multiprocessors(call.inputs.v.device) - call.count * heads
    return max(0, min(BESIDE, call.pieces * heads, left))


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, H, V]``, and if `final` the states that leave the pieces ``[B, N, H, K, V]``; `S0` like those."""
    H = inputs.v.shape[2]
    call = KDACall.of(inputs, cu, scale, H)
    o = torch.empty_like(call.inputs.v)
    leaving = call.states() if final else None
    call.launch("forward", range(H), o, (None if S0 is None else aligned(S0), leaving))
    return o, None if leaving is None else by_row(leaving, inputs.v.shape[0])


def gradients(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, do: Tensor, dS_end: Tensor | None
) -> tuple[Inputs, Tensor]:
    """Those of the inputs, and of the states that enter."""
    B, T, H, _ = inputs.v.shape
    each = group(chunks(B, T, cu), H)
    call = KDACall.of(inputs, cu, scale, each)
    do = aligned(do.to(torch.bfloat16))
    S0, dS_end = (None if x is None else aligned(x.to(torch.float32)) for x in (S0, dS_end))
    found, dS0 = results(call), call.states()
    for heads, kept in by_group(call):
        call.launch("states", heads, None, (S0, None), kept)
        call.launch("backward", heads, None, (dS_end, dS0), kept, (do, *found.qkv, found.g, found.beta))
    return by_key_head(found, inputs.q.shape[2]), by_row(dS0, B)


def results(call: KDACall) -> Inputs:
    """Room for the inputs' gradients; q's and k's have the heads of v."""
    v, g = call.inputs.v, call.inputs.g
    dq, dk, dv = (call.new(*v.shape, dtype=torch.bfloat16) for _ in range(3))
    return Inputs(dq, dk, dv, None if g is None else torch.empty_like(g), call.new(*v.shape[:3]))


def by_group(call: KDACall) -> Iterator[tuple[range, tuple[Tensor, Tensor]]]:
    """Heads at a time, and room for what a backward takes of their chunks, the same for all."""
    H, bf16 = call.inputs.v.shape[2], torch.bfloat16
    each = group(call.chunks, H)
    states = call.new(call.chunks, each, HEAD, HEAD, dtype=bf16)
    writes = call.new(call.chunks, each, CHUNK, HEAD, dtype=bf16)
    for first in range(0, H, each):
        yield range(first, min(first + each, H)), (states, writes)


def chunks(rows: int, tokens: int, cu: Tensor | None) -> int:
    """How many there are at most."""
    return rows * cdiv(tokens, CHUNK) if cu is None else tokens // CHUNK + cu.numel() - 1


@functools.lru_cache(maxsize=512)
def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks' states the backward holds: groups of about one size."""
    most = max(1, KEPT // (chunks * HEAD * (HEAD + CHUNK) * 2))
    return cdiv(heads, math.ceil(heads / most))


def by_row(states: Tensor, rows: int) -> Tensor:
    """States of pieces ``[N, H, K, V]`` by batch row: each has one piece, or the only one all."""
    return states[:, None] if rows > 1 else states[None]
