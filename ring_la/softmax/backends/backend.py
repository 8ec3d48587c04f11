"""What a softmax kernel must be able to do to serve every strategy, layout and mask.

A *block* is queries of some rows against keys of some rows. Forward, a kernel adds its part of (o, lse) to a
`Partial`; backward, it gets the *global* o and lse of its rows, so that each block's gradient stands alone. Adding a
kernel is one file with one class of this shape and a line in `backends/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Pair, Tile
from ..geometry.tiles import squares, tiles
from ..merging import Gradients, Partial, dense
from ..scores import BEYOND, Scores


@dataclass(frozen=True)
class Ask:
    """What a call needs of its kernel, on every rank alike.

    Attributes:
        device, dtype: of q, k and v.
        heads, groups: H and Hk.
        width, value_width: K and V.
        beyond: what its scores have of `scores.BEYOND`.
        windowed: whether more than order bounds what a query sees.
        host_runs: whether the host knows every row's document and position (not with packed offsets on a GPU).
        strided_pairs: whether rows at different strides meet (a mask that follows no band).
        packed: whether there are several documents, of ever new lengths.
        repeatable: whether gradients must be the same bits in every run.
        rows: number of queries of the sequence; None: unknown.
        block: where queries choose their keys, how many each choice stands for.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    width: int
    value_width: int
    beyond: frozenset[str] = frozenset()
    windowed: bool = False
    host_runs: bool = True
    strided_pairs: bool = False
    packed: bool = False
    repeatable: bool = False
    rows: int | None = None
    block: int = 1


class QueryRows(NamedTuple):
    """What the backward pass knows of some queries, over all their keys.

    Attributes:
        q, o, do: ``[B, T, H, ·]``, each query, its result and the gradient of that.
        lse: wide ``[B, H, T]``. delta: ``do·o − dlse`` like it; a kernel that does not take it may get None.
    """

    q: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor | None = None

    def cut(self, rows: slice) -> QueryRows:
        """Some of them, their channels side by side."""
        whole = rows.stop - rows.start == self.q.shape[1]
        sums = (x if x is None or whole else x[:, :, rows] for x in (self.lse, self.delta))
        return QueryRows(*(_cut(x, rows) for x in (self.q, self.o, self.do)), *sums)


class AttentionBackend(ABC):
    """One kernel.

    Attributes:
        takes_delta: whether its backward uses the given Δ, rather than forming ``do·o`` itself; only then can a
            gradient flow into lse.
        sums_wide: whether its gradients of a block come wide, rather than in the inputs' dtype.
        knows: what it knows of `scores.BEYOND`, the parts of a score beyond scale and mask.
        fixed_keys: whether its results are the same bits only where it gets all keys at once.
        forward_only: whether it has no gradients.
    """

    name: str
    fixed_keys = False
    forward_only = False
    takes_delta = True
    sums_wide = True
    knows: frozenset[str] = frozenset()

    def unsupported(self, ask: Ask) -> str:
        """Why this kernel cannot do `ask` here; "" where it can."""
        return next((why for name, why in BEYOND.items() if name in ask.beyond - self.knows), "")

    def suits(self, ask: Ask) -> bool:
        """Whether this kernel, which can do `ask`, is a good choice for it."""
        return True

    def asked(self, ask: Ask) -> AttentionBackend:
        """The kernel as `ask`, which it can do, needs it."""
        return self

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        """Add attention of ``q [B, Tq, H, K]`` over ``k [B, Tk, Hk, K]``, ``v [B, Tk, Hk, V]`` to `out`."""

    @abstractmethod
    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        """Add the block's gradients to `out`."""


class TileBackend(AttentionBackend):
    """A kernel that does one rectangle a call, under a full or a band mask.

    Attributes:
        square_only: its causal mask starts at row 0, key 0 and it has no window.
    """

    takes_delta = False
    sums_wide = False
    square_only = True

    def unsupported(self, ask: Ask) -> str:
        if why := super().unsupported(ask):
            return why
        if ask.windowed and self.square_only:
            return "it has no sliding window"
        if not ask.host_runs:
            return "packed offsets are known to the GPU only"
        if ask.strided_pairs:
            return "a striped layout against keys in order has a mask it does not know"
        if ask.width != ask.value_width and not self.takes_widths(ask):
            return f"it needs K = V, not {ask.width} and {ask.value_width}"
        return ""

    def takes_widths(self, ask: Ask) -> bool:
        """Whether it takes these K and V, which are not the same."""
        return False

    @abstractmethod
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tile: Tile) -> tuple[Tensor, Tensor]:
        """o ``[B, n, H, V]`` and lse ``[B, H, n]`` of tensors cut to the tile."""

    @abstractmethod
    def tile_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of tensors cut to the tile."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        self.add_tiles(squares(pair) if self.square_only else tiles(pair), q, k, v, scores, out)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        self.add_gradients(squares(pair) if self.square_only else tiles(pair), x, k, v, scores, out)

    def add_tiles(self, todo: list[Tile], q: Tensor, k: Tensor, v: Tensor, scores: Scores, out: Partial) -> None:
        """Add tiles, each by a call of its own."""
        for t in todo:
            out.add(*self.tile_forward(_cut(q, t.rows), _cut(k, t.keys), _cut(v, t.keys), scores, t), t.rows)

    def add_gradients(
        self, todo: list[Tile], x: QueryRows, k: Tensor, v: Tensor, scores: Scores, out: Gradients
    ) -> None:
        """Add the gradients of tiles, each by a call of its own."""
        for t in todo:
            out.add(*self.tile_backward(x.cut(t.rows), _cut(k, t.keys), _cut(v, t.keys), scores, t), t.rows, t.keys)


def _cut(x: Tensor, rows: slice) -> Tensor:
    """Some rows of ``x [B, T, H, D]``, their channels side by side: some kernels do not look at their stride."""
    n = rows.stop - rows.start
    return dense(x if n == x.shape[1] else x.narrow(1, rows.start, n))
