"""What the rows of one rank have gathered: results over disjoint keys, put together by their lse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import one_pass
from .parts import Part, stretches, too_many, wide


class Partial:
    """What the rows of one rank have gathered so far: o ``[B, T, H, V]`` and lse ``[B, H, T]``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
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
        if too_many(self._parts, self.shape[1]):
            self.wide()

    def like(self) -> Partial:
        """An empty one of the same rows."""
        return Partial(self.shape, self.dtype, self.device)

    def take(self, other: Partial) -> None:
        """Add what another has gathered of these rows, over other keys."""
        for part in other._parts:
            self.add(part.x, part.lse, slice(part.start, part.stop))

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
        if not copy and one_pass.holds(self._parts, T, dtype):
            self._parts = [one_pass.into_first(self._parts)]
            return self._parts[0].x, self._parts[0].lse
        o = torch.empty(self.shape, dtype=dtype, device=self.device)
        lse = torch.empty((B, H, T), dtype=wide(self.dtype), device=self.device)
        if self._parts and one_pass.fuses(self.device, lse.dtype):
            one_pass.write(o, lse, self._parts)
            return o, lse
        for a, b, parts in stretches(self._parts, T):
            if parts:
                _merge(o[:, a:b], lse[:, :, a:b], parts)
            else:
                o[:, a:b], lse[:, :, a:b] = 0, -torch.inf
        return o, lse


def _merge(o: Tensor, lse: Tensor, parts: Sequence[Part]) -> None:
    """Write what parts of the same rows make into `o` and `lse`."""
    total = torch.logsumexp(torch.stack([p.lse.to(lse.dtype) for p in parts]), 0)
    safe = torch.where(torch.isneginf(total), 0.0, total)
    out = torch.zeros_like(o, dtype=lse.dtype)
    for p in parts:
        out.addcmul_(p.x.to(out.dtype), torch.exp(p.lse - safe).mT.unsqueeze(-1))
    o.copy_(out)
    lse.copy_(total)
