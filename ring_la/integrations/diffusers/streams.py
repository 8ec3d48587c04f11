"""Image, text and both as sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...autograd import first_derivative_only
from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError
from ...layout import Segment

LAYOUTS = 64
"""As many are kept: every prompt that is masked may bring one."""


class Cut(ShardedLayout):
    """A contiguous layout with given numbers of tokens for each rank."""

    def __init__(self, cp: ContextParallel, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        super().__init__(cp, sum(counts), "contiguous")

    @property
    def split(self) -> tuple:
        return (*super().split, self.counts)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        out, start = [], 0
        for rank, n in enumerate(self.counts):
            out += [Segment(start, start + n, rank)] if n else []
            start += n
        return tuple(out)


class Streams:
    """The layouts of one call. Each stream is split evenly, in order; what holds several streams has a rank's part of
    the first, then its part of the second.

    Args:
        layouts: those of the model's calls so far, to which new ones are added.

    Attributes:
        sizes: whole numbers of tokens.
    """

    def __init__(self, cp: ContextParallel, layouts: dict[object, ShardedLayout]) -> None:
        self.cp, self._layouts = cp, layouts
        self.sizes: dict[str, int] = {}

    def of(self, stream: str) -> ShardedLayout:
        """One stream's layout."""
        n = self.sizes[stream]
        return self._kept(n, lambda: self.cp.layout(n, "contiguous"))

    def together(self, streams: tuple[str, ...]) -> ShardedLayout:
        """The layout of all that `streams` hold."""
        if len(streams) == 1:
            return self.of(streams[0])
        return self.cut([sum(n) for n in zip(*(self.of(s).lengths for s in streams))])

    def cut(self, counts: Sequence[int]) -> ShardedLayout:
        """A layout with so many tokens for each rank."""
        return self._kept(tuple(counts), lambda: Cut(self.cp, counts))

    def _kept(self, key: object, make: Callable[[], ShardedLayout]) -> ShardedLayout:
        """A layout made before, or a new one in place of the oldest; the same on all ranks."""
        if key not in self._layouts:
            if len(self._layouts) == LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = make()
        return self._layouts[key]

    def shard(self, name: str, x: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        """This rank's tokens of a whole `x`; what has this rank's tokens alone stays.

        Args:
            name: the argument that `x` is, for the error of another length.
        """
        layouts = [self.of(s) for s in streams]
        whole, local = (sum(n) for n in zip(*((one.seq_len, one.local_length) for one in layouts)))
        got = x.shape[dim] if x.dim() > dim else None
        if got == whole:
            parts = x.split([one.seq_len for one in layouts], dim)
            parts = [one.shard(part, dim) for one, part in zip(layouts, parts)]
            return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        if got != local:
            tokens = " and ".join(streams)
            expected = f"{whole} tokens of {tokens} in dimension {dim}, or this rank's {local}"
            raise ArgumentError(name, expected, list(x.shape))
        return x

    def ranks_of(self, streams: tuple[str, ...]) -> Tensor:
        """The rank of each token where `streams` stand one after the other, int64 on the CPU."""
        ranks = torch.arange(self.cp.size)
        return torch.cat([ranks.repeat_interleave(torch.tensor(self.of(s).lengths)) for s in streams])


class Whole(torch.autograd.Function):
    """All ranks' rows ``[B, T, …]``. The result is the same on all ranks and so is its gradient, of which each takes
    its rows, times `scale`."""

    @staticmethod
    def forward(ctx, x: Tensor, layout: ShardedLayout, scale: int) -> Tensor:
        ctx.layout, ctx.scale = layout, scale
        return layout.gather(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        return ctx.layout.shard(grad) * ctx.scale, None, None
