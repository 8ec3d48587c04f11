"""Partial results of softmax attention, put together.

Two results over disjoint keys merge as  ``lse = log(exp a + exp b)``,  ``o = exp(a − lse) oₐ + exp(b − lse) o_b``;
the order does not matter. A row that has seen no key has lse = −∞ and o = 0.

Parts are kept as kernels return them, and read once, when the whole is asked for: no accumulator is filled, read and
written again for each block. A kernel that accumulates by itself asks for one with ``wide()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

DEEPEST = 6
"""Parts kept for a row, on average; more are put together into one."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What lse and accumulators are kept in: fp32, fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether parts are put together by one Triton kernel."""
    return device.type == "cuda" and wide(dtype) == torch.float32 and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


class Part(NamedTuple):
    """A result of rows ``start … stop − 1``: o, or a gradient, ``[B, n, H, D]``, and of attention lse ``[B, H, n]``."""

    x: Tensor
    lse: Tensor | None
    start: int
    stop: int

    def cut(self, start: int, stop: int) -> Part:
        """Some of its rows."""
        if (start, stop) == (self.start, self.stop):
            return self
        rows = slice(start - self.start, stop - self.start)
        return Part(self.x[:, rows], None if self.lse is None else self.lse[:, :, rows], start, stop)


def segments(parts: Iterable[Part], length: int) -> Iterator[tuple[int, int, list[Part]]]:
    """The rows 0 … length − 1 cut where any part begins or ends: (start, stop, the parts of these rows)."""
    parts = list(parts)
    cuts = sorted({0, length, *(p.start for p in parts), *(p.stop for p in parts)})
    for a, b in zip(cuts, cuts[1:]):
        yield a, b, [p.cut(a, b) for p in parts if p.start <= a and b <= p.stop]


class Partial:
    """What the rows of one rank have gathered so far: o ``[B, T, H, V]`` and lse ``[B, H, T]``."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self._parts: list[Part] = []
        self._own = False  # whether the first part is an accumulator of ours, of all rows

    def add(self, o: Tensor, lse: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """Add a result for some rows, over keys not yet seen."""
        if isinstance(rows, Tensor):
            into, into_lse = self.wide()
            old = Part(into[:, rows], into_lse[:, :, rows], 0, len(rows))
            new = torch.empty_like(old.x), torch.empty_like(old.lse)
            _merge(*new, [old, Part(o, lse, 0, len(rows))])
            into[:, rows], into_lse[:, :, rows] = new
            return
        start, stop, _ = rows.indices(self.shape[1])
        self._parts.append(Part(o, lse, start, stop))
        if _rows(self._parts) > DEEPEST * self.shape[1]:
            self.wide()

    @property
    def empty(self) -> bool:
        """Whether nothing has been added yet."""
        return not self._parts

    def wide(self) -> tuple[Tensor, Tensor]:
        """All so far as accumulators (o, lse), both wide and contiguous, to be written to."""
        if not self._own or len(self._parts) > 1:
            o, lse = self._together(wide(self.dtype), copy=True)
            self._parts, self._own = [Part(o, lse, 0, self.shape[1])], True
        return self._parts[0].x, self._parts[0].lse

    def start(self, sinks: Tensor) -> None:
        """Begin with a key of logit `sinks` ``[H]`` and value zero in every row."""
        self.wide()[1].copy_(sinks[None, :, None])

    def pick(self, rows: Tensor, places: Tensor, length: int) -> Partial:
        """The state of `rows`, at `places` among `length` rows of which the others have seen nothing."""
        out = Partial((self.shape[0], length, *self.shape[2:]), self.dtype, self.device)
        if not self.empty:
            for into, own, dim in zip(out.wide(), self.wide(), (1, 2)):
                into.index_copy_(dim, places, own.index_select(dim, rows))
        return out

    def put(self, part: Partial, places: Tensor, rows: Tensor) -> None:
        """Set `rows` to the rows of another partial result at `places`."""
        for into, other, dim in zip(self.wide(), part.wide(), (1, 2)):
            into.index_copy_(dim, rows, other.index_select(dim, places))

    def result(self) -> tuple[Tensor, Tensor]:
        """(o in the inputs' dtype, lse), contiguous."""
        return self._together(self.dtype, copy=False)

    def _together(self, dtype: torch.dtype, copy: bool) -> tuple[Tensor, Tensor]:
        B, T, H, _ = self.shape
        if len(self._parts) == 1 and self._parts[0].stop - self._parts[0].start == T and not copy:
            return self._parts[0].x.to(dtype).contiguous(), self._parts[0].lse.to(wide(self.dtype)).contiguous()
        o = torch.empty(self.shape, dtype=dtype, device=self.device)
        lse = torch.empty((B, H, T), dtype=wide(self.dtype), device=self.device)
        if self._parts and fuses(self.device, lse.dtype):
            _in_one_pass(o, lse, self._parts)
            return o, lse
        for a, b, parts in segments(self._parts, T):
            if parts:
                _merge(o[:, a:b], lse[:, :, a:b], parts)
            else:
                o[:, a:b], lse[:, :, a:b] = 0, -torch.inf
        return o, lse


def _rows(parts: Sequence[Part]) -> int:
    return sum(p.stop - p.start for p in parts)


def _in_one_pass(o: Tensor, lse: Tensor | None, parts: Sequence[Part]) -> None:
    """Write what parts make into `o` and, of attention, `lse`: fused, some at a time if they are many."""
    from . import fused

    while len(parts) > fused.MOST:
        first, last = min(p.start for p in parts[: fused.MOST]), max(p.stop for p in parts[: fused.MOST])
        moved = [p._replace(start=p.start - first, stop=p.stop - first) for p in parts[: fused.MOST]]
        some = Part(
            torch.empty_like(o[:, first:last], dtype=torch.float32),
            None if lse is None else torch.empty_like(lse[:, :, first:last]),
            first,
            last,
        )
        fused.add(some.x, moved) if lse is None else fused.merge(some.x, some.lse, moved)
        parts = [*parts[fused.MOST :], some]
    fused.add(o, parts) if lse is None else fused.merge(o, lse, parts)


def _merge(o: Tensor, lse: Tensor, parts: Sequence[Part]) -> None:
    """Write what parts of the same rows make into `o` and `lse`."""
    total = torch.logsumexp(torch.stack([p.lse.to(lse.dtype) for p in parts]), 0)
    safe = torch.where(torch.isneginf(total), 0.0, total)
    out = torch.zeros_like(o, dtype=lse.dtype)
    for p in parts:
        out.addcmul_(p.x.to(out.dtype), torch.exp(p.lse - safe).mT.unsqueeze(-1))
    o.copy_(out)
    lse.copy_(total)


class Sum:
    """A sum over parts of the rows of ``[B, T, H, D]``, formed wide and, like `Partial`, in one pass at the end."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), wide(dtype), device
        self._parts: list[Part] = []
        self._own = False

    @classmethod
    def like(cls, x: Tensor) -> Sum:
        """An empty sum for the gradient of `x`."""
        return cls(x.shape, x.dtype, x.device)

    def add(self, part: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """Add to some rows. Rows may be given by number, also repeatedly."""
        if isinstance(rows, Tensor):
            self.wide().index_add_(1, rows, part.to(self.dtype))
            return
        start, stop, _ = rows.indices(self.shape[1])
        self._parts.append(Part(part, None, start, stop))
        if _rows(self._parts) > DEEPEST * self.shape[1]:
            self.wide()

    def wide(self) -> Tensor:
        """All so far as one wide contiguous accumulator, to be added to."""
        if not self._own or len(self._parts) > 1:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.write(out)
            self._parts, self._own = [Part(out, None, 0, self.shape[1])], True
        return self._parts[0].x

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum, contiguous."""
        whole = len(self._parts) == 1 and self._parts[0].stop - self._parts[0].start == self.shape[1]
        if whole and self._parts[0].x.dtype == dtype:
            return self._parts[0].x.contiguous()
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.write(out)
        return out

    def settled(self, dtype: torch.dtype) -> Sum:
        """The same with its parts read now, into memory of its own."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.write(out)
        total = Sum(self.shape, self.dtype, self.device)
        total.add(out)
        return total

    def write(self, out: Tensor) -> None:
        """The sum into ``out [B, T, H, D]`` of any dtype."""
        if len(self._parts) > 1 and fuses(out.device, out.dtype):
            _in_one_pass(out, None, self._parts)
            return
        for a, b, parts in segments(self._parts, self.shape[1]):
            _add(out[:, a:b], parts)

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """The sum as (start, stop, rows in `dtype`), without a copy of rows that have one part."""
        for a, b, parts in segments(self._parts, self.shape[1]):
            if len(parts) == 1 and parts[0].x.dtype == dtype:
                yield a, b, parts[0].x
            else:
                rows = torch.empty((self.shape[0], b - a, *self.shape[2:]), dtype=dtype, device=self.device)
                _add(rows, parts)
                yield a, b, rows


def _add(out: Tensor, parts: Sequence[Part]) -> None:
    """Write the sum of parts of the same rows into `out`."""
    if len(parts) < 2:
        out.copy_(parts[0].x) if parts else out.zero_()
    elif fuses(out.device, out.dtype):
        _in_one_pass(out, None, [p._replace(start=0, stop=out.shape[1]) for p in parts])
    else:
        total = parts[0].x.to(wide(out.dtype), copy=True)
        for part in parts[1:]:
            total += part.x
        out.copy_(total)


@dataclass(frozen=True)
class Gradients:
    """Sums of the gradients of one block; a kernel adds to rows of dq and to keys of dk and dv."""

    dq: Sum
    dk: Sum
    dv: Sum

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Empty ones."""
        return cls(Sum.like(q), Sum.like(k), Sum.like(v))

    def add(self, dq: Tensor, dk: Tensor, dv: Tensor, rows: slice | Tensor, keys: slice | Tensor) -> None:
        """Add a tile's gradients."""
        self.dq.add(dq, rows)
        self.dk.add(dk, keys)
        self.dv.add(dv, keys)


def row_sums(do: Tensor | None, o: Tensor, dlse: Tensor | None) -> Tensor:
    """``Δ_i = do_i · o_i − dlse_i``, wide ``[B, H, T]``: what the backward pass subtracts from every ``do_i · v_j``."""
    dtype = wide(o.dtype)
    if do is not None and fuses(o.device, dtype):
        from . import fused

        delta = fused.row_sums(do, o)
    elif do is None:
        delta = torch.zeros(o.shape[0], o.shape[2], o.shape[1], dtype=dtype, device=o.device)
    else:
        delta = (do.to(dtype) * o.to(dtype)).sum(-1).transpose(1, 2).contiguous()
    return delta if dlse is None else delta - dlse.to(dtype)
