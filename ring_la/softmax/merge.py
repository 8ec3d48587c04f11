"""Partial results of softmax attention, put together.

Two results over disjoint keys merge as  ``lse = log(exp a + exp b)``,  ``o = exp(a − lse) oₐ + exp(b − lse) o_b``;
the order does not matter. A row that has seen no key has lse = −∞ and o = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What lse and accumulators are kept in: fp32, fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether merges run as one Triton kernel."""
    return device.type == "cuda" and dtype == torch.float32 and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


class Partial:
    """What the rows of one rank have gathered so far: o ``[B, T, H, V]`` and lse ``[B, H, T]``."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._o: Tensor | None = None
        self._lse: Tensor | None = None
        self._own = False  # whether _o is an accumulator of ours, rather than a kernel's output

    def add(self, o: Tensor, lse: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """Add a result for some rows, over keys not yet seen."""
        if self._lse is None and isinstance(rows, slice) and o.shape[1] == self.shape[1]:
            self._o, self._lse = o, lse.to(wide(self.dtype))
            return
        self._open()
        if isinstance(rows, slice) and fuses(self.device, self._o.dtype):
            from .fused import merge

            merge(self._o[:, rows], self._lse[:, :, rows], o, lse)
            return
        into, old, new = self._o[:, rows], self._lse[:, :, rows], lse
        total = torch.logaddexp(old, new)
        safe = torch.where(torch.isneginf(total), 0.0, total)
        keep, take = (torch.exp(x - safe).transpose(1, 2).unsqueeze(-1) for x in (old, new))
        into.mul_(keep).addcmul_(o.to(into.dtype), take.to(into.dtype))
        old.copy_(total)
        if isinstance(rows, Tensor):
            self._o[:, rows], self._lse[:, :, rows] = into, old

    @property
    def empty(self) -> bool:
        """Whether nothing has been added yet."""
        return self._lse is None

    def wide(self) -> tuple[Tensor, Tensor]:
        """The accumulators (o, lse), both wide, to be written to."""
        self._open()
        return self._o, self._lse

    def start(self, sinks: Tensor) -> None:
        """Begin with a key of logit `sinks` ``[H]`` and value zero in every row."""
        self._open()
        self._lse.copy_(sinks[None, :, None])

    def pick(self, rows: Tensor, places: Tensor, length: int) -> Partial:
        """The state of `rows`, at `places` among `length` rows of which the others have seen nothing."""
        out = Partial((self.shape[0], length, *self.shape[2:]), self.dtype, self.device)
        if self._lse is not None:
            out._open()
            out._o.index_copy_(1, places, self._o.index_select(1, rows).to(out._o.dtype))
            out._lse.index_copy_(2, places, self._lse.index_select(2, rows))
        return out

    def put(self, part: Partial, places: Tensor, rows: Tensor) -> None:
        """Set `rows` to the rows of another partial result at `places`."""
        part._open()
        self._open()
        self._o.index_copy_(1, rows, part._o.index_select(1, places))
        self._lse.index_copy_(2, rows, part._lse.index_select(2, places))

    def _open(self) -> None:
        """Make `_o` and `_lse` accumulators that can be written to."""
        B, T, H, _ = self.shape
        dtype = wide(self.dtype)
        if self._lse is None:
            self._o = torch.zeros(self.shape, dtype=dtype, device=self.device)
            self._lse = torch.full((B, H, T), -torch.inf, dtype=dtype, device=self.device)
        elif not self._own:
            contiguous = dict(copy=True, memory_format=torch.contiguous_format)
            self._o, self._lse = (x.to(dtype, **contiguous) for x in (self._o, self._lse))
        self._own = True

    def result(self) -> tuple[Tensor, Tensor]:
        """(o in the inputs' dtype, lse)."""
        if self._lse is None:
            self._open()
        return self._o.to(self.dtype).contiguous(), self._lse.contiguous()


def row_sums(do: Tensor | None, o: Tensor, dlse: Tensor | None) -> Tensor:
    """``Δ_i = do_i · o_i − dlse_i``, wide ``[B, H, T]``: what the backward pass subtracts from every ``do_i · v_j``."""
    dtype = wide(o.dtype)
    if do is None:
        delta = torch.zeros(o.shape[0], o.shape[2], o.shape[1], dtype=dtype, device=o.device)
    else:
        delta = (do.to(dtype) * o.to(dtype)).sum(-1).transpose(1, 2).contiguous()
    return delta if dlse is None else delta - dlse.to(dtype)


@dataclass(frozen=True)
class Gradients:
    """Wide accumulators of the gradients of one block; a kernel adds to rows of dq and to keys of dk and dv."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def add(self, dq: Tensor, dk: Tensor, dv: Tensor, rows: slice | Tensor, keys: slice | Tensor) -> None:
        """Add a tile's gradients. Rows and keys may be given by number, keys also repeatedly."""
        for into, part, places in ((self.dq, dq, rows), (self.dk, dk, keys), (self.dv, dv, keys)):
            if isinstance(places, slice):
                into[:, places] += part
            else:
                into.index_add_(1, places, part.to(into.dtype))


def zeros_like(x: Tensor) -> Tensor:
    """A wide accumulator for the gradient of `x`."""
    return torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
