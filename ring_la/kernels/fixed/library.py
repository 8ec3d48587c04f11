"""``x W (+ bias)`` by cuBLAS, as far as a check on this device has shown that a row's bits do not depend on the others.

cuBLAS chooses its kernel by the shape. The bits of a row are those it gives at one fixed shape, of ROWS rows; another
number of rows is one call where that gives the same bits on numbers drawn at random, rows in another order, and cut
into such calls, the last filled up with zeros, where it does not. A weight of which the place of a row matters even at
the fixed shape is not for it. What is found is kept: a shape is checked once a process, at a few times its own cost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_la.errors import UnsupportedError

ROWS = 512
"""Of the fixed shape: from so many on cuBLAS splits no sum of the shapes it was tried on."""
LARGE = (8192, 2048)
"""Rows of a call that are tried where the whole number does not do."""
LEAST = 128
"""Columns and terms of a weight, at least: of smaller ones cuBLAS splits the sum."""


class Weight(NamedTuple):
    """All that cuBLAS's choice depends on but the number of rows."""

    K: int
    N: int
    transposed: bool
    bias: bool
    dtype: torch.dtype
    device: torch.device
    settings: tuple[object, ...]

    @classmethod
    def of(cls, w: Tensor, bias: Tensor | None, transposed: bool) -> Weight:
        """Of ``w [K, N]``, or transposed ``[N, K]``."""
        K, N = reversed(w.shape) if transposed else w.shape
        matmul = torch.backends.cuda.matmul
        settings = (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_fp16_accumulation,
            torch.backends.cuda.preferred_blas_library(),
        )
        return cls(K, N, transposed, bias is not None, w.dtype, w.device, settings)


class Found(NamedTuple):
    """What the check of a weight has found: whether rows are alike at the fixed shape, and of which other numbers."""

    alike: bool
    rows: dict[int, bool]


_found: dict[Weight, Found] = {}


def library_product(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
    """``x w + bias`` of ``x [rows, K]``, rows > 0, all contiguous on 16-byte boundaries; None where cuBLAS is not for
    it: by the weight alone, never by the rows.

    Raises:
        UnsupportedError: a weight that was not checked before its step is captured.
    """
    kind = Weight.of(w, bias, transposed)
    if min(kind.K, kind.N) < LEAST or kind.K % 8 or kind.N % 8:
        return None
    found = _found.get(kind)
    if found is None:
        if _capturing(kind.device):
            raise UnsupportedError("capture", "a deterministic step that has run before", "a new weight", "Run it once")
        found = _found[kind] = Found(_places_do_not_matter(kind), {})
    if not found.alike:
        return None
    rows = len(x)
    if _one_call(kind, found, rows):
        return _call(x, w, bias, transposed)
    out, at = x.new_empty(rows, kind.N), 0
    for size in (*(n for n in LARGE if n < rows and _one_call(kind, found, n)), ROWS):
        while at + size <= rows:
            out[at : at + size] = _call(x[at : at + size], w, bias, transposed)
            at += size
    if at < rows:
        rest = x.new_zeros(ROWS, kind.K)
        rest[: rows - at] = x[at:]
        out[at:] = _call(rest, w, bias, transposed)[: rows - at]
    return out


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _call(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        return F.linear(x, w if transposed else w.mT, bias)


def _one_call(kind: Weight, found: Found, rows: int) -> bool:
    """Whether so many rows may be one call."""
    if rows not in found.rows:
        if _capturing(kind.device):
            return False  # the calls of the fixed shape are always right
        x, w, bias, rng = _drawn(kind)
        at = torch.randint(ROWS, (rows,), generator=rng, device=kind.device)
        fixed = _call(x, w, bias, kind.transposed)
        found.rows[rows] = torch.equal(_call(x[at], w, bias, kind.transposed), fixed[at])
    return found.rows[rows]


def _places_do_not_matter(kind: Weight) -> bool:
    """Whether rows have the same bits at every place of the fixed shape, beside other rows."""
    x, w, bias, rng = _drawn(kind)
    fixed = _call(x, w, bias, kind.transposed)
    orders = [torch.randperm(ROWS, generator=rng, device=kind.device) for _ in range(3)]
    orders.append(torch.arange(ROWS, device=kind.device).flip(0))
    alike = all(torch.equal(_call(x[at], w, bias, kind.transposed), fixed[at]) for at in orders)
    beside = torch.cat([x[:1], torch.zeros_like(x[1:])])
    return alike and torch.equal(_call(beside, w, bias, kind.transposed)[0], fixed[0])


def _drawn(kind: Weight) -> tuple[Tensor, Tensor, Tensor | None, torch.Generator]:
    """Numbers of such shapes, always the same."""
    rng = torch.Generator(kind.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=kind.device).to(kind.dtype)

    w = normal(*((kind.N, kind.K) if kind.transposed else (kind.K, kind.N)))
    return normal(ROWS, kind.K), w, normal(kind.N) if kind.bias else None, rng
