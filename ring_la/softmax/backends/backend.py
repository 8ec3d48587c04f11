"""What a softmax kernel must be able to do to serve every strategy, layout and mask.

A *block* is queries of some rows against keys of some rows. Forward, a kernel adds its part of (o, lse) to a
`Partial`; backward, it gets the *global* o and lse of its rows, so that each block's gradient stands alone. Adding a
kernel is one file with one class of this shape and a line in `backends/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..merge import Gradients, Partial
from ..scores import Scores
from ..tiles import Tile, squares, tiles
from ..tokens import Tokens


@dataclass(frozen=True)
class Ask:
    """What a call needs of its kernel, on every rank alike.

    Attributes:
        device, dtype: of q, k and v.
        heads, groups: H and Hk.
        width, value_width: K and V.
        scores: scale, mask, biases and dropout.
        host_runs: whether the host knows every row's document and position (not with packed offsets on a GPU).
        strided_pairs: whether rows at different strides meet (a mask that follows no band).
        packed: whether there are several documents, of ever new lengths.
        repeatable: whether gradients must be the same bits in every run.
        rows: number of queries of the sequence; None: unknown.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    width: int
    value_width: int
    scores: Scores
    host_runs: bool = True
    strided_pairs: bool = False
    packed: bool = False
    repeatable: bool = False
    rows: int | None = None


class Backend(ABC):
    """One kernel.

    Attributes:
        takes_delta: whether its backward uses the given Δ, rather than forming ``do·o`` itself; only then can a
            gradient flow into lse.
        sums_wide: whether its gradients of a block come wide, rather than in the inputs' dtype.
    """

    name: str
    takes_delta = True
    sums_wide = True

    @abstractmethod
    def refuses(self, ask: Ask) -> str:
        """Why this kernel cannot do `ask` here, or an empty string."""

    def suits(self, ask: Ask) -> bool:
        """Whether this kernel, which can do `ask`, is a good choice for it."""
        return True

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        """Add attention of ``q [B, Tq, H, K]`` over ``k [B, Tk, Hk, K]``, ``v [B, Tk, Hk, V]`` to `out`."""

    @abstractmethod
    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        """Add the block's gradients to `out`; o, lse and ``delta = do·o − dlse`` are those over all keys.

        A kernel that does not take delta may get None.
        """


class TileBackend(Backend):
    """A kernel that does one rectangle a call, under a full or a band mask.

    Attributes:
        square_only: its causal mask starts at row 0, key 0 and it has no window.
    """

    takes_delta = False
    sums_wide = False
    square_only = True

    def refuses(self, ask: Ask) -> str:
        s = ask.scores
        if s.softcap:
            return "it has no softcap"
        if s.alibi_slopes is not None:
            return "it has no ALiBi"
        if s.dropout_p:
            return "its dropout mask would change with the split"
        if s.windowed and self.square_only:
            return "it has no sliding window"
        if not ask.host_runs:
            return "packed offsets are known to the GPU only"
        if ask.strided_pairs:
            return "a striped layout against keys in order has a mask it does not know"
        if ask.width != ask.value_width:
            return f"it needs K = V, not {ask.width} and {ask.value_width}"
        return ""

    @abstractmethod
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
        """o ``[B, n, H, V]`` and lse ``[B, H, n]`` of tensors cut to the tile."""

    @abstractmethod
    def tile_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of tensors cut to the tile."""

    def _tiles(self, scores: Scores, tq: Tokens, tk: Tokens) -> list[Tile]:
        whole = tiles(scores, tq, tk)
        if not self.square_only:
            return whole
        kept, mask = tq.tiles[tk], ("squares", scores.left, scores.right)
        if mask not in kept:
            kept[mask] = [s for t in whole for s in squares(t)]
        return kept[mask]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        for t in self._tiles(scores, tq, tk):
            part = self.tile_forward(q_rows(q, t), k_rows(k, t), k_rows(v, t), scores.scale, t)
            out.add(*part, t.rows)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        for t in self._tiles(scores, tq, tk):
            row_lse = lse if t.q1 - t.q0 == lse.shape[2] else lse[:, :, t.rows]
            of_q, of_k = [q_rows(x, t) for x in (do, q, o)], [k_rows(x, t) for x in (k, v)]
            parts = self.tile_backward(*of_q[:2], *of_k, of_q[2], row_lse, scores.scale, t)
            out.add(*parts, t.rows, t.keys)


def q_rows(x: Tensor, t: Tile) -> Tensor:
    """The rows of a tile of ``x [B, T, H, D]`` on the queries' side."""
    return x if t.q1 - t.q0 == x.shape[1] else x.narrow(1, t.q0, t.q1 - t.q0)


def k_rows(x: Tensor, t: Tile) -> Tensor:
    """The same on the keys' side."""
    return x if t.k1 - t.k0 == x.shape[1] else x.narrow(1, t.k0, t.k1 - t.k0)
