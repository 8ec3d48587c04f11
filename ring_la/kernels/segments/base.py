"""What the launches of every rule share: shapes, gates, and the scan over segments."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Border, Inputs
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.streams import SideStream, aside, join
from ring_la.kernels.runtime.triton_version import gluon_is_proven
from ring_la.kernels.segments import table
from ring_la.kernels.segments.cut import Cut
from ring_la.kernels.segments.prefix import prefix_dense_kernel, prefix_kernel, through_kernel
from ring_la.kernels.segments.table import Launch, cdiv, power_of_2, width
from ring_la.kernels.triton.gates import factors_kernel

DECAY = {"none": 0, "scalar": 1, "diagonal": 2}


class Kept(NamedTuple):
    """What the gradients need again of what the output made; None where a rule has no such thing."""

    F: Tensor | None = None
    G: Tensor | None = None
    A: Tensor | None = None
    M: Tensor | None = None
    low: Tensor | None = None
    Av: Tensor | None = None
    L: Tensor | None = None
    transition: Tensor | None = None
    entering: Tensor | None = None
    u: Tensor | None = None
    states: Tensor | None = None
    whole: Tensor | None = None
    """The transitions of a call whose pieces states enter; `transition` lacks each piece's first."""
    passed: Tensor | None = None
    """The products of each piece's dense transitions, where states go through it."""
    bounds: Tensor | None = None
    """What the norms of chunks' transitions are at most (`horizon`)."""
    Ar: Tensor | None = None
    """What A's rounding left."""


@functools.lru_cache(maxsize=4096)
def segment_length(rows: int, T: int, H: int, K: int, V: int, chunk: int, waves: int, least: int) -> int:
    """Tokens a segment: enough segments to fill the GPU, a power of two of chunks, a segment's offsets in 31 bits."""
    wanted = max(1, waves // (rows * max(1, V // 64)))
    chunks = power_of_2(max(1, round(max(T / wanted, least * chunk) / chunk)))
    most = (2**31 - 1) // (H * max(K, V, chunk) * chunk)
    return max(1, min(chunks, power_of_2(cdiv(T, chunk)), 1 << (max(1, most).bit_length() - 1))) * chunk


@functools.lru_cache(maxsize=4096)
def wave_length(programs: int, T: int, H: int, K: int, V: int, chunk: int, slots: int, least: int) -> int:
    """Tokens a segment where `programs` run for each: the fewest segments that leave little of the GPU idle."""

    def busy(n: int) -> float:
        return programs * n / (cdiv(programs * n, slots) * slots)

    counts = range(1, max(2, 2 * slots // programs + 1))
    count = next((n for n in counts if busy(n) >= 0.9), None) or max(counts, key=busy)
    most = (2**31 - 1) // (H * max(K, V, chunk) * chunk)
    return max(1, min(max(cdiv(T, count * chunk), least), cdiv(T, chunk), most)) * chunk


def once(g: Tensor | None) -> Tensor | None:
    """A decay a head that is the same for all tokens (a tensor expanded over them) as ``[1, 1, H]``; others as they
    are."""
    if g is None or g.dim() != 3:
        return g
    (B, T, H), (batch, token, head) = g.shape, g.stride()
    if (token and T > 1) or (batch and B > 1):
        return g
    return g.as_strided((1, 1, H), (0, 0, head))


def total(parts: Tensor) -> Tensor:
    """The sum of what the blocks of channels found, see `Base._by_block`."""
    return parts if parts.dim() == 3 else parts.sum(0)


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon, which is not the same in every version of Triton, are for this device."""
    here = device.type == "cuda" and torch.version.cuda is not None and gluon_is_proven()
    return here and torch.cuda.get_device_capability(device)[0] == 9


class Base:
    """One rank's tokens under one rule, cut into chunks and segments. A scalar decay may come as from `once`."""

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, kept: Kept | None = None) -> None:
        dtype = inputs.v.dtype
        self.rule, self.name, self.given, self.scale = rule, str(rule), inputs, float(scale)
        q, k, v, g, beta, a, b = (None if x is None else aligned(x) for x in inputs)
        q, k, a, b = (x if x is None or x.dtype == dtype else x.to(dtype) for x in (q, k, a, b))
        self.inputs = Inputs(q, k, v, g, beta, a, b)
        self.B, self.T, self.H, self.V = inputs.v.shape
        self.HK, self.K = inputs.q.shape[2:]
        self.cu = None if cu is None else aligned(cu.to(device=inputs.v.device, dtype=torch.int32))
        self.device = inputs.v.device
        self.decay = DECAY[rule.decay]
        self.delta = rule.write == "delta"
        self.dplr = rule.write == "dplr"
        self.dense = self.delta or self.dplr
        self.simple = rule.write == "additive" and self.decay < 2
        self.precision = "tf32x3" if dtype == torch.float32 else "tf32"
        self.chunk = 32 if dtype == torch.float32 else table.CHUNK
        shape = self.T, self.H, self.K, self.V, self.chunk
        if self.simple:
            wide = max(64, width(self.K), width(self.V))
            programs = self._rows * (cdiv(wide, 64) if wide > 128 else 1)
            length = wave_length(programs, *shape, table.SLOTS[wide], table.LEAST)
            length = min(length, self._most)
        else:
            waves = table.WAVES["additive" if rule.write == "additive" else "delta"]
            length = segment_length(self._rows, *shape, waves, table.LEAST)
        self.segments = Cut.of(self.T, length, self.chunk, self.cu)
        self.chunks = Cut.of(self.T, self.chunk, self.chunk, self.cu) if self.decay or not self.simple else None
        self._kept = kept or Kept()
        self.F = self.G = self.bounds = self.inputs.v  # where a rule has none, any tensor
        if self._kept.F is not None:
            self.F = self._kept.F
        elif self.simple and self.decay and not self._static:
            self.F = self._factors()  # delta writes: by the chunks' products
        if self._kept.G is not None:
            self.G = self._kept.G
        if self._kept.bounds is not None:
            self.bounds = self._kept.bounds
        self._bounded = False  # whether the chunks' products are to find bounds
        self._crowded = False  # whether an exchange runs beside these launches

    # -- shapes --------------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """Tokens a segment of a simple rule at most."""
        return 2**31

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype)

    @property
    def _gluon(self) -> bool:
        """Whether kernels in Gluon are for the device and these head sizes."""
        return {self.K, self.V} <= {64, 128} and self.inputs.v.element_size() == 2 and hopper(self.device)

    def _by_block(self, blocks: int) -> Tensor:
        """Room for what each block of channels adds to a number a token and head: ``[blocks, B, T, H]``, or of a single
        one ``[B, T, H]``."""
        return self._new(*(blocks,)[: blocks > 1], self.B, self.T, self.H)

    def _state(self, S: Tensor | None) -> Tensor | None:
        return None if S is None else aligned(S.to(torch.float32))

    def _cotangent(self, do: Tensor) -> Tensor:
        return aligned(do.to(self.inputs.v.dtype))

    def _pieces(self) -> Tensor:
        return self._new(self.B, self.segments.pieces, self.H, self.K, self.V)

    def _maps_of_pieces(self) -> Tensor:
        return self._new(self.B, self.segments.pieces, self.H, self.K, self.K)

    def _as_given(self, grads: Inputs) -> Inputs:
        """Gradients of value heads summed over the heads that share a q/k head, in the inputs' dtypes."""
        out = []
        for name, x, grad in zip(Inputs._fields, self.given, grads):
            if x is None or grad is None:
                out.append(None)
                continue
            if name in ("q", "k") and self.HK != self.H:
                grad = grad.view(self.B, self.T, self.HK, -1, self.K).sum(3, dtype=torch.float32)
            out.append(grad.to(x.dtype))
        return Inputs(*out)

    @property
    def _packed(self) -> bool:
        return self.cu is not None

    @property
    def _NC(self) -> int:
        pieces = 0 if self.cu is None else self.cu.numel() - 1
        return self.T // self.chunk + pieces if pieces else cdiv(self.T, self.chunk)

    @property
    def _rows(self) -> int:
        return self.B * self.H

    def _pick(self, entries: dict[int, Launch]) -> Launch:
        found = table.pick(entries, self.name, self.K, self.V, self.inputs.v.dtype)
        # dplr's second stream fills the shared memory that prefetching would take
        return dataclasses.replace(found, stages=1, registers=0) if self.dplr else found

    @functools.cached_property
    def _static(self) -> bool:
        """Whether a head's decay is the same at every token: it came as from `once`, or as one that would."""
        return self.decay == 1 and once(self.given.g).shape[:2] != (self.B, self.T)

    # -- scans over segments -------------------------------------------------------------------------------

    def _factors(self) -> Tensor:
        """By token, chunk by chunk: a scalar decay's factors (see `gates`)."""
        cut, out, block = self.chunks, self._room_for_factors(), min(16, power_of_2(self.H))
        launch(
            factors_kernel, (cut.count, cdiv(self.H, block), self.B), self.inputs.g, out, cut.table, self.T, cut.count,
            self.scale, H=self.H, C=self.chunk, BH=block, STATIC=self._once, VARLEN=self._packed, num_warps=4,
        )  # fmt: skip
        return out

    def _room_for_factors(self) -> Tensor:
        return self._new(self.B, self.chunks.count, self.H, 4, self.chunk)

    @property
    def _once(self) -> bool:
        """Whether a scalar decay lies in memory once a head."""
        return self.decay == 1 and self.inputs.g.shape[:2] != (self.B, self.T)

    def _prefix(
        self, own: Tensor, transition: Tensor | None, S0: Tensor | None, reverse: bool, enter: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The states entering the segments (not `enter`: any tensor), and those leaving the pieces."""
        cut = self.segments
        entering, leaving = self._new(*own.shape) if enter or self._in_parts else own, self._pieces()
        if self.dense:
            self._prefix_dense(own, transition, S0, leaving, None, entering, reverse=reverse, enter=enter)
            return entering, leaving
        block = 1024
        launch(
            prefix_kernel, (cdiv(self.K * self.V, block), cut.pieces, self._rows), own,
            own if transition is None else transition, own if S0 is None else S0, entering, leaving, cut.first,
            cut.count, cut.pieces, H=self.H, K=self.K, V=self.V, DECAY=self.decay, HAS_S0=S0 is not None, ENTER=enter,
            REVERSE=reverse, BLK=block, VARLEN=self._packed, num_warps=4,
        )  # fmt: skip
        return entering, leaving

    def _cross(
        self, own: Tensor, transition: Tensor | None, S0: Tensor | None, reverse: bool, border: Border,
        beside: SideStream | None = None,
    ) -> Callable[[], tuple[Tensor, Tensor]]:  # fmt: skip
        """Start `_prefix` with what comes from beyond this rank's pieces, on the stream `beside` if there is one; the
        result waits for it."""
        cut = self.segments
        if self.dense:
            return self._cross_dense(own, transition, S0, reverse, border, beside)
        if border.whole[reverse]:
            entering, leaving = self._new(*own.shape), self._pieces()
        else:
            entering, leaving = self._prefix(own, transition, S0, reverse)
        with aside(beside):
            states = S0, entering, leaving, cut.first
            border.segments(self.rule.transition, transition, own, *states, reverse, beside is not None)

        def finish() -> tuple[Tensor, Tensor]:
            join(beside)
            return entering, leaving

        return finish

    def _cross_dense(
        self,
        own: Tensor,
        transition: Tensor,
        S0: Tensor | None,
        reverse: bool,
        border: Border,
        beside: SideStream | None,
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """The same for dense maps: links need those of whole pieces, and the scan starts again with what arrives."""
        arrives, passed = border.arrives[reverse], self._kept.passed
        if not arrives:
            entering, leaving = self._prefix(own, transition, S0, reverse)
            arrived = leaving
        elif border.carries[reverse] and passed is None and not reverse:
            leaving, passed = self._pieces(), self._maps_of_pieces()
            room = (torch.empty_like(x) if self._in_parts else None for x in (own, transition))
            self._prefix_dense(own, transition, S0, leaving, passed, *room)
        else:
            _, leaving = self._prefix(own, transition, S0, reverse, enter=False)
            passed = self._through(transition) if border.carries[reverse] and passed is None else passed
        if arrives:
            self._kept, several = self._kept._replace(passed=passed), self.segments.pieces > 1
            zero = torch.zeros_like if several else torch.empty_like
            arrived = S0.clone() if several and S0 is not None else zero(leaving)
        with aside(beside):
            border.dense(passed, arrived, leaving, reverse)

        def finish() -> tuple[Tensor, Tensor]:
            join(beside)
            return self._prefix(own, transition, arrived, reverse) if arrives else (entering, leaving)

        return finish

    def _prefix_dense(
        self, own: Tensor, transition: Tensor, S0: Tensor | None, leaving: Tensor | None, passed: Tensor | None = None,
        entering: Tensor | None = None, before: Tensor | None = None, *, reverse: bool = False, enter: bool = False,
    ) -> None:  # fmt: skip
        """`prefix_dense_kernel` into `leaving` or `passed` or both; `entering` and `before` are room where transitions
        are read in parts."""
        cut, how = self.segments, self._dense(table.PREFIX if passed is None else table.PREFIX_MAPS)
        columns = sum(cdiv(n, how["BV"]) for n, out in ((self.V, leaving), (self.K, passed)) if out is not None)
        room = (own if x is None else x for x in (S0, entering, leaving, before, passed))
        launch(
            prefix_dense_kernel, (columns, cut.pieces, self._rows), own, transition, *room, cut.first, cut.count,
            cut.pieces, H=self.H, K=self.K, V=self.V, HAS_S0=S0 is not None, ENTER=enter, STATES=leaving is not None,
            MAPS=passed is not None, REVERSE=reverse, VARLEN=self._packed, BJ=self._whole, **how,
        )  # fmt: skip

    def _dense(self, entries: dict[int, Launch]) -> dict[str, int]:
        """Constants of the kernels that multiply states by dense transitions."""
        how, wide = entries[max(64, width(self.K))], width(self.K)
        return {"BK": wide, "BV": how.block} | how.options

    @property
    def _whole(self) -> int:
        """Columns of a dense transition that a scan reads at a time: all up to 128."""
        return width(self.K) if width(self.K) <= 128 else 32

    @property
    def _in_parts(self) -> bool:
        """Whether a dense transition meets the state in parts, which it finds in `entering`."""
        return self.dense and self._whole < width(self.K)

    def _through(self, transition: Tensor | None) -> Tensor | None:
        """The product of each piece's transitions, from its segments'."""
        if transition is None:
            return None
        cut = self.segments
        if self.dense:
            before, out = torch.empty_like(transition) if self._in_parts else None, self._maps_of_pieces()
            self._prefix_dense(transition, transition, None, None, out, None, before)
            return out
        out = self._new(self.B, cut.pieces, *transition.shape[2:])
        channels, block = math.prod(transition.shape[2:]), 256
        launch(
            through_kernel, (cdiv(channels, block), cut.pieces, self.B), transition, out, cut.first, cut.count,
            cut.pieces, channels, BLK=block, VARLEN=self._packed, num_warps=4,
        )  # fmt: skip
        return out
