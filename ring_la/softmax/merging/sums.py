"""Sums of gradients over the blocks that give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import one_pass
from .parts import Part, stretches, too_many, wide


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

    @property
    def empty(self) -> bool:
        """Whether nothing has been added yet."""
        return not self._parts

    @property
    def given(self) -> torch.dtype:
        """The dtype of the one part there is; wide where there are others to be added up."""
        return self._parts[0].x.dtype if len(self._parts) == 1 else self.dtype

    def add(self, part: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """Add to some rows. Rows may be given by number, also repeatedly."""
        if isinstance(rows, Tensor):
            self.wide().index_add_(1, rows, part.to(self.dtype))
            return
        start, stop, _ = rows.indices(self.shape[1])
        self._parts.append(Part(part, None, start, stop))
        if too_many(self._parts, self.shape[1]):
            self.wide()

    def take(self, other: Sum) -> None:
        """Add another sum's parts."""
        for part in other._parts:
            self.add(part.x, slice(part.start, part.stop))

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
        if one_pass.holds(self._parts, self.shape[1], dtype):
            self._parts = [one_pass.into_first(self._parts)]
            return self._parts[0].x
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.write(out)
        return out

    def over_columns(self, columns: slice) -> Tensor:
        """The sum over some columns, too, wide ``[B, T, H]``."""
        out = torch.zeros(self.shape[:3], dtype=self.dtype, device=self.device)
        for p in self._parts:
            out[:, p.start : p.stop] += p.x[..., columns].to(self.dtype).sum(-1)
        return out

    def settled(self, dtype: torch.dtype) -> Sum:
        """The same with its parts read now, into memory of its own."""
        if one_pass.holds(self._parts, self.shape[1], dtype):
            self._parts = [one_pass.into_first(self._parts)]
            out = self._parts[0].x
        else:
            out = torch.empty(self.shape, dtype=dtype, device=self.device)
            self.write(out)
        total = Sum(self.shape, self.dtype, self.device)
        total.add(out)
        return total

    def write(self, out: Tensor) -> None:
        """The sum into ``out [B, T, H, D]`` of any dtype."""
        if len(self._parts) > 1 and one_pass.fuses(out.device, out.dtype):
            one_pass.write(out, None, self._parts)
            return
        for a, b, parts in stretches(self._parts, self.shape[1]):
            _add(out[:, a:b], parts)

    def stretches(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """The sum as (start, stop, rows in `dtype`), without a copy of rows that have one part."""
        for a, b, parts in stretches(self._parts, self.shape[1]):
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
    elif one_pass.fuses(out.device, out.dtype):
        one_pass.write(out, None, [p._replace(start=0, stop=out.shape[1]) for p in parts])
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
    if do is not None and one_pass.fuses(o.device, dtype):
        from . import fused  # needs Triton

        delta = fused.row_sums(do, o)
    elif do is None:
        delta = torch.zeros(o.shape[0], o.shape[2], o.shape[1], dtype=dtype, device=o.device)
    else:
        delta = (do.to(dtype) * o.to(dtype)).sum(-1).transpose(1, 2).contiguous()
    return delta if dlse is None else delta - dlse.to(dtype)
