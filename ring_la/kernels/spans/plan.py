"""What is settled once for a rank's tokens under one rule: sizes, chunks, spans, and what follows from them.

A *chunk* is what kernels multiply as matrices, a *span* a run of chunks of one piece that one program works through.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels import gpu
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.triton_version import gluon_is_proven
from ring_la.kernels.sizes import cdiv, power_of_2, width
from ring_la.kernels.spans import table
from ring_la.kernels.spans.heads import summed
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.spans.table import Tiling

DECAY = {"none": 0, "scalar": 1, "diagonal": 2}
"""A rule's decay as kernels take it."""


@functools.lru_cache(maxsize=4096)
def length_for_waves(rows: int, T: int, H: int, K: int, V: int, chunk: int, waves: int, least: int) -> int:
    """Tokens a span: enough spans to fill the GPU, a power of two of chunks, a span's offsets in 31 bits."""
    wanted = max(1, waves // (rows * max(1, V // 64)))
    chunks = power_of_2(max(1, round(max(T / wanted, least * chunk) / chunk)))
    most = (2**31 - 1) // (H * max(K, V, chunk) * chunk)
    return max(1, min(chunks, power_of_2(cdiv(T, chunk)), 1 << (max(1, most).bit_length() - 1))) * chunk


@functools.lru_cache(maxsize=4096)
def length_for_slots(programs: int, T: int, H: int, K: int, V: int, chunk: int, slots: int, least: int) -> int:
    """Tokens a span where `programs` run for each: the fewest spans that leave little of the GPU idle."""

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


def query_dtype(rule: Rule, q: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What kernels take q in: the `dtype` of products' operands, or under a rule that is additive with a decay per key
    channel fp32, where it came so. They round it themselves, and its gradient is not rounded."""
    fine = rule.write == "additive" and rule.decay == "diagonal" and q.dtype == torch.float32
    return torch.float32 if fine else dtype


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon, which is not the same in every version of Triton, are for this device."""
    return gpu.is_hopper(device) and gluon_is_proven()


def little_shared(device: torch.device) -> bool:
    """Whether a program gets less shared memory than the tables ask for: Ada and GeForce cards have 100 KB."""
    return device.type == "cuda" and gpu.shared_memory(device) < table.SHARED


class CallSizes(NamedTuple):
    """Batch, tokens, heads of v, heads of q and k, channels of keys and of values."""

    B: int
    T: int
    H: int
    HK: int
    K: int
    V: int


@dataclass(frozen=True)
class SpanPlan:
    """One rank's tokens under one rule, cut into chunks and spans.

    Attributes:
        chunk: tokens a chunk. chunks: all of them; None where no kernel asks (no decay). spans: see above.
        constant: a scalar decay is the same at every token (it came expanded over them, or as from `once`). by_head: it
            lies in memory once a head.
        crowded: an exchange runs beside the launches.
    """

    rule: Rule
    scale: float
    sizes: CallSizes
    dtype: torch.dtype
    device: torch.device
    chunk: int
    spans: Runs
    chunks: Runs | None
    packed: bool
    constant: bool
    by_head: bool
    crowded: bool = False

    @classmethod
    def of(
        cls, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, runs: tuple[Runs, Runs] | None = None
    ) -> SpanPlan:
        """Of inputs as `ready` makes them or not, on whose device the tables of pieces at `cu` are made; `runs`: the
        spans and the chunks, where they are known."""
        v, g, scalar = inputs.v, inputs.g, rule.decay == "scalar"
        (B, T, H, V), (HK, K) = v.shape, inputs.q.shape[2:]
        sizes, chunk = CallSizes(B, T, H, HK, K, V), 32 if v.dtype == torch.float32 else table.CHUNK
        cu = None if cu is None else aligned(cu.to(device=v.device, dtype=torch.int32))
        if runs is not None:
            spans, chunks = runs
        else:
            spans = Runs.of(T, span_length(rule, sizes, chunk, v.dtype), chunk, cu)
            chunks = None if rule.transition == "identity" else Runs.of(T, chunk, chunk, cu)
        strong = rule.write == "additive" and inputs.beta is not None  # by token, and so are then its factors
        constant = scalar and not strong and once(g).shape[:2] != (B, T)
        by_head = scalar and g.shape[:2] != (B, T)
        return cls(
            rule, float(scale), sizes, v.dtype, v.device, chunk, spans, chunks, cu is not None, constant, by_head
        )

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.sizes.B * self.sizes.H

    @functools.cached_property
    def chunk_count(self) -> int:
        """Chunks, at most."""
        T, pieces = self.sizes.T, self.spans.pieces if self.packed else 0
        return T // self.chunk + pieces if pieces else cdiv(T, self.chunk)

    @property
    def dense(self) -> bool:
        return self.rule.transition == "dense"

    @property
    def half(self) -> bool:
        """Whether tensors are of two bytes."""
        return self.dtype.itemsize == 2

    @property
    def precision(self) -> str:
        return "tf32x3" if self.dtype == torch.float32 else "tf32"

    @property
    def gluon(self) -> bool:
        """Whether kernels in Gluon are for the device and these head sizes."""
        return {self.sizes.K, self.sizes.V} <= {64, 128} and self.half and hopper(self.device)

    @property
    def fits(self) -> bool:
        return fits(self.sizes, self.dtype)

    @property
    def saves_states(self) -> bool:
        """Whether the pass that makes the output leaves the states before the chunks for the backward."""
        B, _, H, _, K, V = self.sizes
        return B * self.chunk_count * H * V * K * self.dtype.itemsize <= table.SAVED_STATES

    def pick(self, entries: table.Table) -> Tiling:
        _, _, _, _, K, V = self.sizes
        # what erases along a key of its own reads keys twice, as under a decay per key channel
        rule = "delta_diagonal" if self.rule.write == "erase" else str(self.rule)
        found = self.fitting(table.pick(entries, rule, K, V, self.dtype))
        if self.rule.write != "dplr":
            return found
        # the second stream fills the shared memory that prefetching would take, but beside few keys: and there ptxas
        # 12.8 loses the addresses of products' operands where nothing is prefetched
        return dataclasses.replace(found, stages=min(found.stages, 2) if K <= 32 < V else 1, registers=0)

    def fitting(self, how: Tiling) -> Tiling:
        """`how`, with half the stages where there is little shared memory."""
        return dataclasses.replace(how, stages=max(1, how.stages // 2)) if little_shared(self.device) else how

    # -- tensors -------------------------------------------------------------------------------------------

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype)

    def tokens(self, D: int) -> Tensor:
        """Room for D channels of every token and head, in the inputs' dtype."""
        return self.new(self.sizes.B, self.sizes.T, self.sizes.H, D, dtype=self.dtype)

    def states_of_pieces(self) -> Tensor:
        B, _, H, _, K, V = self.sizes
        return self.new(B, self.spans.pieces, H, K, V)

    def states_of_spans(self) -> Tensor:
        B, _, H, _, K, V = self.sizes
        return self.new(B, self.spans.count, H, K, V)

    def factors(self) -> Tensor:
        """Room for a scalar decay's factors by token, chunk by chunk (see `triton.gates`)."""
        return self.new(self.sizes.B, self.chunks.count, self.sizes.H, 4, self.chunk)

    def ready(self, inputs: Inputs) -> Inputs:
        """Inputs as kernels take them: aligned, and products' operands of one dtype (but see `query_dtype`)."""
        skips = self.rule.write == "additive"  # a is then what of v passes by, a number a head
        inputs = inputs._replace(a=once(inputs.a)) if skips else inputs
        q, k, v, g, beta, a, b = (None if x is None else aligned(x) for x in inputs)
        if not skips:
            a, b = (x if x is None or x.dtype == self.dtype else x.to(self.dtype) for x in (a, b))
        k = k if k.dtype == self.dtype else k.to(self.dtype)
        q = q.to(query_dtype(self.rule, q, self.dtype))
        return Inputs(q, k, v, g, beta, a, b)

    def state(self, S: Tensor | None) -> Tensor | None:
        return None if S is None else aligned(S.to(torch.float32))

    def cotangent(self, do: Tensor) -> Tensor:
        return aligned(do.to(self.dtype))

    def as_given(self, given: Inputs, grads: Inputs) -> Inputs:
        """Gradients of value heads summed over the heads that share a q/k head, in the inputs' dtypes."""
        B, T, _, HK, K, _ = self.sizes
        known = [(n, getattr(given, n), getattr(grads, n)) for n in ("q", "k")]
        shared = [(n, x.dtype, y.view(B, T, -1, K)) for n, x, y in known if y is not None and y.numel() != x.numel()]
        if shared:  # they are of value heads, or of pairs of them
            names, dtypes, each = zip(*shared)
            grads = grads._replace(**dict(zip(names, summed(each, HK, dtypes))))
        return Inputs(*(None if x is None or grad is None else grad.to(x.dtype) for x, grad in zip(given, grads)))


def span_length(rule: Rule, sizes: CallSizes, chunk: int, dtype: torch.dtype) -> int:
    """Tokens a span."""
    B, T, H, _, K, V = sizes
    if rule.transition not in ("identity", "scalar"):
        waves = table.WAVES["additive" if rule.write == "additive" else "delta"]
        return length_for_waves(B * H, T, H, K, V, chunk, waves, table.LEAST_CHUNKS)
    wide = max(64, width(K), width(V))
    programs = B * H * (cdiv(wide, 64) if wide > 128 else 1)
    length = length_for_slots(programs, T, H, K, V, chunk, table.SLOTS[wide], table.LEAST_CHUNKS)
    # where a decay's gradient is a sum over a span errors add up, so that it is short
    return min(length, table.GATE_SPAN) if rule.decay == "scalar" and not fits(sizes, dtype) else length


def fits(sizes: CallSizes, dtype: torch.dtype) -> bool:
    """Whether one program can hold a head's state beside its operands: then gradients share passes."""
    return max(sizes.K, sizes.V) <= 128 and dtype.itemsize == 2
