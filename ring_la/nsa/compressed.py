"""Compressed keys: blocks of `length` tokens, one every `stride`, each made one key and one value by a map.

Blocks are counted from each document's first token and are whole. A block belongs to the rank that has its last token;
that rank is sent the tokens of its blocks that others have, and makes their keys. These, a `stride`-th of all, go to
every rank. They stand where their last tokens stand, so that a causal mask is right: a query sees full blocks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import is_floats
from ..context import ShardedLayout
from ..context.gather import Gather
from ..errors import ArgumentError, describe_tensor
from ..indexers.chosen import Rows
from ..softmax.call import AttentionCall
from ..softmax.geometry import Tokens
from ..softmax.geometry.placement import WholePlacement
from ..softmax.geometry.tokens import Run
from ..softmax.scores import Scores
from ..softmax.tensors import Tensors

BlockMap = Callable[[Tensor, Tensor], Tensor]
"""Makes of blocks ``[B, N, length, Hk, D]`` and the positions ``[N]`` of their first tokens in their documents one row
each ``[B, N, Hk, ·]``; N may be 0."""


class Compressed:
    """The blocks of all documents, and those that this rank makes.

    Attributes:
        first: places of their first tokens, on the host ``[N]``. last: of their last ones, on the device.
        number: of each in its document, on the host ``[N]``. document: its document, likewise.
        world_size, lengths, order: which rank makes which, as `context.gather` takes it.
        place: where this rank's queries and all compressed keys stand.
    """

    def __init__(self, length: int, stride: int, rows: Rows) -> None:
        self.length, self.stride, self.layout, device = length, stride, rows.layout, rows.tokens.device
        counts = [max(0, (b - a - length) // stride + 1) for a, b in zip(rows.cu_seqlens, rows.cu_seqlens[1:])]
        self.number = torch.cat([torch.arange(n, device="cpu") for n in counts])
        self.document = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
        self.first = torch.tensor(rows.cu_seqlens, device="cpu")[self.document] + self.number * stride
        last = self.first + length - 1
        self.last = last.to(device)
        owners = torch.zeros_like(last) if rows.layout is None else rows.layout.owners_of(last)[0]
        self.world_size = 1 if rows.layout is None else rows.layout.world_size
        self._rank = 0 if rows.layout is None else rows.layout.rank
        by_rank = [torch.nonzero(owners == r).flatten() for r in range(self.world_size)]
        self.lengths, self.order = tuple(map(len, by_rank)), torch.cat(by_rank)
        tokens = [_tokens(self.first[mine], length) for mine in by_rank]
        self._wanted = [t.unique() for t in tokens]
        self._inside = torch.searchsorted(self._wanted[self._rank], tokens[self._rank]).to(device)
        self.positions = (self.number[by_rank[self._rank]] * stride).to(device)
        self.place = self._place(counts, rows)

    @classmethod
    def of(cls, length: int, stride: int, rows: Rows) -> Compressed:
        """Made once a layout."""
        make = functools.partial(cls, length, stride, rows)
        return make() if rows.layout is None else rows.layout.kept(cls, make, length, stride)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def local_length(self) -> int:
        """Blocks that this rank makes."""
        return self.lengths[self._rank]

    def _place(self, counts: list[int], rows: Rows) -> WholePlacement:
        device, runs, offset = rows.tokens.device, [], 0
        for document, n in enumerate(counts):
            if n:
                index = rows.cu_seqlens[document] + self.length - 1
                runs.append(Run(offset, n, index, self.length - 1, document, self.stride))
            offset += n
        keys = Tokens(runs, offset, device)
        if isinstance(rows.layout, ShardedLayout):
            queries = Tokens.of_ranks(rows.layout, (rows.layout.rank,), device)
        elif len(rows.last) == rows.total:
            queries = Tokens.whole(rows.total, device, rows.cu_seqlens)
        else:
            queries = Tokens.whole(len(rows.last), device, None, rows.total - len(rows.last))
        return WholePlacement((queries,), (keys,), len(counts) > 1, counts)

    def blocks(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks that this rank makes keys of: ``[B, N, length, Hk, K]`` and ``[…, V]``."""
        both = torch.cat([k, v], -1)
        if self.layout is not None:
            name = "compressed", self.length, self.stride
            both = self.layout.route(name, lambda: self._wanted)(both, 1)
        elif len(self._wanted[0]) < both.shape[1]:
            both = both[:, self._wanted[0].to(both.device)]
        of_k, of_v = both[:, self._inside].split([k.shape[3], v.shape[3]], -1)
        return of_k, of_v

    def everywhere(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed keys ``[B, N, Hk, K]`` and values ``[B, N, Hk, V]`` of all documents, on every rank, from what
        this rank has made."""
        if self.layout is None:
            return k, v
        whole = Gather.apply(torch.cat([k, v], -1).movedim(1, 0), self, self.layout.cp.comm).movedim(0, 1)
        of_k, of_v = whole.split([k.shape[3], v.shape[3]], -1)
        return of_k, of_v

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` and lse ``[B, H, T]`` of this rank's queries over the full blocks of their documents."""
        x = Tensors(q, k.contiguous(), v.contiguous())
        plan = AttentionCall(Scores(scale=scale, right=0), "none", backend).planned(x, self.place, "ring")
        return plan(x)


def _tokens(first: Tensor, length: int) -> Tensor:
    """Places of the tokens of blocks, ``[N, length]``."""
    return first[:, None] + torch.arange(length, device="cpu") if len(first) else first.new_empty(0, length)


def mapped(
    blocks: tuple[Tensor, Tensor], compress_k: BlockMap, compress_v: BlockMap, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """One key and one value of each block. Gradients of a map's parameters are this rank's part."""
    made = []
    for argument, compress, x in zip(("compress_k", "compress_v"), (compress_k, compress_v), blocks):
        y = compress(x, positions)
        expected = [*x.shape[:2], *x.shape[3:4]]
        if not is_floats(y, 4) or list(y.shape[:3]) != expected or y.device != x.device:
            to = f"[B, N, Hk, ·] = [{', '.join(map(str, expected))}, ·], of floats on {x.device}"
            got = f"{describe_tensor(y)} on {y.device}" if isinstance(y, Tensor) else describe_tensor(y)
            raise ArgumentError(argument, f"a map to {to}", got)
        made.append(y.to(x.dtype))
    for argument, y, x, whose in zip(("compress_k", "compress_v"), made, blocks, ("q", "v")):
        if y.shape[3] != x.shape[4]:
            raise ArgumentError(argument, f"a map to {x.shape[4]} channels, those of {whose}", y.shape[3])
    return made[0], made[1]
