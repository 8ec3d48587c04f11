"""What the reference functions share: checks, of which a bad argument raises `ArgumentError`, naming what was expected
and came; and documents, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.errors import ArgumentError, UnsupportedError


def expect_shape(name: str, x: Any, **dims: int | tuple[int, ...] | None) -> None:
    """Check that `x` has these dims, in order: a size, several allowed sizes, or None for any."""
    allowed = {dim: size if isinstance(size, tuple) else (size,) for dim, size in dims.items()}
    fits = x.dim() == len(dims) and all(
        sizes == (None,) or n in sizes for n, sizes in zip(x.shape, allowed.values(), strict=True)
    )
    if not fits:
        shape = (dim if sizes == (None,) else f"{dim}={'|'.join(map(str, sizes))}" for dim, sizes in allowed.items())
        raise ArgumentError(name, f"shape [{', '.join(shape)}]", list(x.shape))


def expect_local(layout: object, backend: str | None, mode: str = "auto") -> None:
    """The reference runs on one device, in one way: refuse what it would otherwise ignore."""
    if layout is not None:
        raise ArgumentError("layout", "None", layout, "The reference runs on one device")
    if backend not in (None, "reference"):
        raise UnsupportedError("backend", "None or 'reference'", repr(backend), "This is the reference itself")
    if mode not in ("auto", "chunk", "recurrent"):
        raise ArgumentError("mode", "'auto', 'chunk' or 'recurrent'", repr(mode))


class Document(NamedTuple):
    """A document, or all rows of an unpacked batch: B documents of one length, which a token loop takes together."""

    states: slice
    """Its rows of a state [N, ...]."""
    rows: slice
    """Its rows of the batch."""
    tokens: slice

    def each(self, *x: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Its tokens, one after the other, of each of these ``[B, T, …]``; None of a None. All of a tensor's are made
        at once: the gradient of ``x[:, t]`` alone is as long as `x`."""
        return zip(*(repeat(None) if t is None else t[self.rows, self.tokens].unbind(1) for t in x))


def documents(batch: int, tokens: int, cu_seqlens: Tensor | Sequence[int] | None) -> list[Document]:
    """The documents of a `[B, T]` batch, in order; the last one's `states.stop` is N."""
    if cu_seqlens is None:
        return [Document(slice(0, batch), slice(0, batch), slice(0, tokens))]
    if batch != 1:
        raise ArgumentError("cu_seqlens", "None, or a batch of one packed row", f"a batch of {batch}")
    bounds = torch.as_tensor(cu_seqlens).tolist()
    increasing = len(bounds) > 1 and all(start <= end for start, end in pairwise(bounds))
    if not increasing or bounds[0] != 0 or bounds[-1] != tokens:
        raise ArgumentError("cu_seqlens", f"non-decreasing offsets from 0 to {tokens}", bounds)
    return [Document(slice(n, n + 1), slice(0, 1), slice(*span)) for n, span in enumerate(pairwise(bounds))]
