"""Launching the general kernels: block sizes, strides, and what else they take."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....kernels import sizes
from ...geometry import Pair
from ...scores import Scores
from ...sums import put, width_with_sums
from . import plan, table

interpreted = False
"""Set by tests that run the kernels in Triton's interpreter, on the CPU."""
OfSums = tuple[Tensor, Tensor] | None
"""Of queries and of keys: the channels that their running sums ride in, or gradients of the sums ``[B, heads, T]``."""


def apart(q: Tensor, k: Tensor, scores: Scores) -> tuple[OfSums, Tensor, Tensor]:
    """The channels that running sums ride in, and q and k without them."""
    if not scores.sums:
        return None, q, k
    (q, q_sums), (k, k_sums) = (x.tensor_split([scores.sums], -1) for x in (q, k))
    return (q_sums, k_sums), q, k


def of_tokens(x: Tensor) -> Tensor:
    """Room for a number a token and head of ``x [B, T, H, ·]``, fp32 ``[B, H, T]``."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], dtype=torch.float32)


def put_sums(grads: tuple[Tensor | None, Tensor | None], ds: tuple[Tensor | None, Tensor | None], s: Scores) -> None:
    """Write ``Σ ds [B, H, T]`` of queries and of keys as gradients of their sums' channels; None: not of these."""
    of_queries, of_keys = (None if x is None else x.transpose(1, 2) * s.scale for x in ds)
    put(grads, (of_queries, of_keys), s.sums)


class BlockCall:
    """One block's tensors, and what every launch needs of them.

    Args:
        o: o, or a gradient with its strides.
    """

    def __init__(
        self, scores: Scores, pair: Pair, q: Tensor, k: Tensor, v: Tensor, o: Tensor, of_sums: OfSums = None
    ) -> None:
        self.scores, self.pair, self.q, self.k, self.v, self.o, self.of_sums = scores, pair, q, k, v, o, of_sums

    @cached_property
    def width(self) -> int:
        """Columns of the wider of K's and V's tiles."""
        return sizes.width(max(self.q.shape[3], self.v.shape[3]))

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Constants of all kernels, but for a tile's rows and keys."""
        (K, V), dtype = (self.q.shape[3], self.v.shape[3]), self.q.dtype
        full = dict(FULL_K=sizes.width(K) == K, FULL_V=columns_of_values(K, V) == V)
        precision = "ieee" if dtype == torch.float32 else "tf32"
        sums = sizes.width(self.of_sums[0].shape[3]) if self.of_sums else 0
        return dict(BK=sizes.width(K), BV=columns_of_values(K, V), SUMS=sums, PRECISION=precision) | full

    @cached_property
    def strides(self) -> list[int]:
        """Of q, k, v and o, but in channels, where it is 1; then K, V and the channels of a head in dq and dk."""
        sums, K = self.scores.sums, self.q.shape[3]
        out = [stride for x in (self.q, self.k, self.v, self.o) for stride in x.stride()[:3]]
        return [*out, K, self.v.shape[3], width_with_sums(sums, self.q.dtype) if sums else K]


class General(BlockCall):
    """The kernels of every score (`kernels`)."""

    options: ClassVar[dict[str, Any]] = {}
    """Of Triton's compiler."""

    def forward(self, o: Tensor, lse: Tensor) -> None:
        """Write o and lse."""
        from . import kernels

        self.over_queries(kernels.forward, table.FORWARD, self.q, self.k, self.v, o, lse)

    def backward(self, lse: Tensor, delta: Tensor, grads: tuple[Tensor, ...], of_sums: OfSums) -> None:
        """Write dq, dk and dv, and the gradients of sums."""
        from ....kernels.runtime.launch import filled
        from . import kernels

        dq, dk, dv = grads
        dcq, dck = filled(*(of_sums or (None, None)), by=dq)
        inputs = (self.q, self.k, self.v, self.o, lse, delta)
        self.over_keys(kernels.backward_keys, table.BACKWARD_KEYS, *inputs, dk, dv, dck)
        self.over_queries(kernels.backward_queries, table.BACKWARD_QUERIES, *inputs, dq, dcq)

    def over_queries(self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor) -> None:
        """Launch one program for each tile of queries of a head."""
        how = self._settings(settings)
        lists = self.of_queries(how)
        grid = -(-self.q.shape[1] // how.rows), self.q.shape[0] * self.q.shape[2]
        self._launch(kernel, grid, how, lists, tensors)

    def over_keys(self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor) -> None:
        """Launch one program for each tile of keys of a key head."""
        how = self._settings(settings)
        lists = self.of_keys(how)
        grid = -(-self.k.shape[1] // how.keys), self.q.shape[0] * self.k.shape[2]
        self._launch(kernel, grid, how, lists, tensors)

    def of_queries(self, how: table.TileSettings) -> plan.TileLists:
        """The tiles of keys that each tile of queries meets."""
        return plan.of_queries(self.pair, how.rows, how.keys)

    def of_keys(self, how: table.TileSettings) -> plan.TileLists:
        """The tiles of queries that each tile of keys meets."""
        return plan.of_keys(self.pair, how.rows, how.keys)

    def _settings(self, settings: dict[int, table.TileSettings]) -> table.TileSettings:
        return table.settings(settings, self.width, self.q.dtype)

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        how: table.TileSettings,
        lists: plan.TileLists,
        tensors: tuple[Tensor, ...],
    ) -> None:
        from ....kernels.runtime.launch import launch

        s = self.scores
        launch(
            kernel, grid, *tensors, *lists, *self._common(lists),
            BM=how.rows, BN=how.keys, **self.shared,
            CAP=s.softcap > 0, ALIBI=s.alibi_slopes is not None, DROP=s.dropout_p > 0,
            LEFT=s.left is not None, RIGHT=s.right is not None,
            num_warps=how.warps, num_stages=how.stages, tensors="any", **self.options,
        )  # fmt: skip

    def _common(self, lists: plan.TileLists) -> list:
        """The arguments that follow the lists, in the kernels' order."""
        from ....kernels.runtime.launch import filled

        s, q, k = self.scores, self.q, self.k
        slopes = None if s.alibi_slopes is None else s.alibi_slopes.float().contiguous()
        heads = None
        if s.dropout_p:
            heads = torch.arange(q.shape[2], device=q.device) if s.heads is None else s.heads
            heads = heads.to(torch.int32)
        keep_scale, threshold = 1 / (1 - s.dropout_p), int(s.dropout_p * 2**32)
        return [
            *filled(*self.pair.rows.columns, *self.pair.keys.columns, slopes, heads),
            s.scale, s.softcap, s.left or 0, s.right or 0, keep_scale, *map(_signed, (threshold, *s.seed_bits)),
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], lists.tiles.shape[1], 1 if slopes is None else len(slopes),
            *self.strides,
        ]  # fmt: skip


def columns_of_values(K: int, V: int) -> int:
    """Columns of a tile of values: up to 64 as many as of keys. Of narrower ones ptxas 12.8 makes products with an
    operand whose address nothing defines (`tests.gpu.check_registers`)."""
    return max(sizes.width(V), min(sizes.width(K), 64))


def _signed(x: int) -> int:
    """The low 32 bits as a signed number, so that the kernels' argument has one type."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x
