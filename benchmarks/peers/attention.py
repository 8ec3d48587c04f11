"""Other libraries' split attention for `bench attention`: ring-flash-attn and yunchang, where they are installed.

Each states which tokens of the sequence a rank holds, so that its results can be compared with ours. Where flash-attn
is absent they run on PyTorch's FlashAttention-2 (see `flash_attn.py`).
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .flash_attn import flash_attn

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """One library's way.

    Attributes:
        name: a row's title.
        tokens: the places in the sequence of this rank's tokens, int64 ``[T]``.
        call: its attention of q, k and v ``[1, T, H, D]``.
    """

    name: str
    tokens: Tensor
    call: Call


def zigzag(start: int, stop: int, rank: int, ranks: int) -> Tensor:
    """The tokens ``start … stop − 1`` that a rank of a zigzag split holds; their number is a multiple of 2·ranks."""
    chunks = torch.arange(start, stop).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def library(name: str) -> ModuleType | None:
    """The module, or None where it cannot be imported; says so."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        print(f"without {name}: {e}", flush=True)
        return None


class Peers:
    """What is installed, on this rank of `P`; makes yunchang's groups once. Collective."""

    def __init__(self, rank: int, P: int) -> None:
        self.rank, self.P, self.layers = rank, P, []
        with flash_attn():
            self.ring, yunchang = library("ring_flash_attn"), library("yunchang")
        for ulysses in sorted({1, max(1, P // 2)}) if yunchang else ():
            yunchang.set_seq_parallel_pg(ulysses, P // ulysses, rank, P)
            layer = yunchang.LongContextAttention(ring_impl_type="zigzag")
            self.layers.append((ulysses, P // ulysses, layer))

    def of(self, cu: list[int], window: int, softcap: float) -> Iterator[Peer]:
        """Those that do causal attention of these documents with this window and softcap."""
        if softcap:
            return
        if len(cu) == 2 and window < 0:
            yield from self._yunchang(cu[-1])
        if self.ring is None:
            return
        if len(cu) == 2 and window < 0:
            dense = self.ring.zigzag_ring_flash_attn_func
            tokens = zigzag(0, cu[-1], self.rank, self.P)
            yield Peer("ring-flash-attn zigzag", tokens, lambda *x: dense(*x, causal=True))
        elif window < 0:
            yield self._zigzag_of_each_document(cu)
        if len(cu) > 2 or window >= 0:
            yield self._llama3(cu, window)

    def _yunchang(self, length: int) -> Iterator[Peer]:
        """Zigzag over the ring's axis, then in equal runs over the Ulysses axis."""
        for ulysses, ring, layer in self.layers:
            held = zigzag(0, length, self.rank // ulysses, ring).chunk(ulysses)[self.rank % ulysses]
            call = lambda *x, layer=layer: layer(*x, causal=True)  # noqa: E731
            yield Peer(f"yunchang ulysses {ulysses} × ring {ring}", held, call)

    def _zigzag_of_each_document(self, cu: list[int]) -> Peer:
        theirs = self.ring.zigzag_ring_flash_attn_varlen_func
        spans = list(itertools.pairwise(cu))
        tokens = torch.cat([zigzag(a, b, self.rank, self.P) for a, b in spans])
        local = torch.tensor(cu, dtype=torch.int32, device="cuda") // self.P
        longest = max(b - a for a, b in spans) // self.P
        return Peer(
            "ring-flash-attn zigzag varlen",
            tokens,
            lambda *x: theirs(*(t[0] for t in x), local, longest, causal=True)[None],
        )

    def _llama3(self, cu: list[int], window: int) -> Peer:
        theirs, offsets = self.ring.llama3_flash_attn_varlen_func, torch.tensor(cu, dtype=torch.int32)
        q, k, *rest = self.ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, self.rank, self.P)
        lengths, keys = (q.cuda(), k.cuda(), *rest[:2]), rest[2]
        how = dict(heads_k_stride=8, local_k_slice=keys, causal=True, window_size=(window, 0 if window >= 0 else -1))
        return Peer(
            "ring-flash-attn llama3 varlen",
            torch.arange(cu[-1]).chunk(self.P)[self.rank],
            lambda *x: theirs(*(t[0] for t in x), *lengths, **how)[None],
        )
