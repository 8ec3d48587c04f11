"""Other libraries' split attention for `bench attention`: ring-flash-attn, yunchang, xDiT, Diffusers and fast-ulysses,
where they are installed.

Each states which tokens of the sequence a rank holds, so that its results can be compared with ours, and runs on a
kernel of ours, by name: the first three by flash_attn's entry points, lent to them (see `flash_attn.py`); Diffusers on
cuDNN's and PyTorch's FlashAttention-2 alone, which it calls itself; fast-ulysses, which exchanges and computes
nothing, around a call on one device.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ring_la.softmax import attention

from .flash_attn import flash_attn, use

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
OF_DIFFUSERS = {"cudnn": "_native_cudnn", "flash": "_native_flash"}
"""Diffusers' names of kernels that are ours too."""


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


@dataclass(frozen=True)
class Wanted:
    """What peers are asked for.

    Attributes:
        cu: offsets of the documents. window: keys to the left; −1: all. heads: of queries and of keys.
        kernel: the name of one of ours.
    """

    cu: list[int]
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    heads: tuple[int, int] = (32, 32)
    kernel: str = "flash"

    @property
    def plain(self) -> bool:
        """Whether it is one document without a window."""
        return len(self.cu) == 2 and self.window < 0


def zigzag(start: int, stop: int, rank: int, ranks: int) -> Tensor:
    """The tokens ``start … stop − 1`` that a rank of a zigzag split holds; their number is a multiple of 2·ranks."""
    chunks = torch.arange(start, stop).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def library(name: str) -> ModuleType | None:
    """The module, or None where it cannot be imported; says so."""
    try:
        return importlib.import_module(name)
    except Exception as e:  # a library for another torch fails in ways of its own
        print(f"without {name}: {type(e).__name__}: {' '.join(str(e).split())[:200]}", flush=True)
        return None


class Peers:
    """What is installed, on this rank of `P`; makes their groups once. Collective."""

    def __init__(self, rank: int, P: int) -> None:
        self.rank, self.P, self.layers = rank, P, []
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        with flash_attn():
            self.ring, yunchang = library("ring_flash_attn"), library("yunchang")
            self.xdit = self._xdit() if yunchang else None
        for ulysses in sorted({1, max(1, P // 2)}) if yunchang else ():
            yunchang.set_seq_parallel_pg(ulysses, P // ulysses, rank, P)
            layers = {kind: yunchang.LongContextAttention(ring_impl_type=kind) for kind in ("zigzag", "basic")}
            self.layers.append((ulysses, P // ulysses, layers))
        self.diffusers = library("diffusers.models.attention_dispatch")
        self.degrees = self._degrees() if self.diffusers and P > 1 else {}
        fast = library("fast_ulysses") if P > 1 else None
        self.fast = fast.UlyssesGroup() if fast else None

    def of(self, wanted: Wanted) -> Iterator[Peer]:
        """Those that do this."""
        for peer in self._ways(wanted):
            yield Peer(peer.name, peer.tokens, _on(wanted.kernel, peer.call))

    @staticmethod
    def _xdit() -> ModuleType | None:
        """xfuser's ring. Version 0.7.0 imports a function for NPUs that no release of yunchang has (0.6.4)."""
        utils = importlib.import_module("yunchang.ring.utils")
        vars(utils).setdefault("update_npu_out", None)
        return library("xfuser.core.long_ctx_attention.ring")

    def _ways(self, x: Wanted) -> Iterator[Peer]:
        if x.softcap:
            return
        if x.plain:
            yield from self._yunchang(x)
        if not x.causal:
            yield from self._bidirectional(x)
        elif self.ring is not None:
            yield from self._ring_flash_attn(x)

    def _yunchang(self, x: Wanted) -> Iterator[Peer]:
        """Zigzag over the ring's axis, or without a mask in order, then in equal runs over the Ulysses axis."""
        length = x.cu[-1]
        for ulysses, ring, layers in self.layers:
            if x.heads[1] % ulysses:
                continue
            layer = layers["zigzag" if x.causal else "basic"]
            own = torch.arange(length).chunk(self.P)[self.rank]
            if x.causal:
                own = zigzag(0, length, self.rank // ulysses, ring).chunk(ulysses)[self.rank % ulysses]
            call = lambda *t, layer=layer: layer(*t, causal=x.causal)  # noqa: E731
            yield Peer(f"yunchang ulysses {ulysses} × ring {ring}", own, call)

    def _ring_flash_attn(self, x: Wanted) -> Iterator[Peer]:
        if x.plain:
            dense = self.ring.zigzag_ring_flash_attn_func
            tokens = zigzag(0, x.cu[-1], self.rank, self.P)
            yield Peer("ring-flash-attn zigzag", tokens, lambda *t: dense(*t, causal=True))
            return
        if x.window < 0:
            yield self._zigzag_of_each_document(x.cu)
        yield self._llama3(x.cu, x.window)

    def _bidirectional(self, x: Wanted) -> Iterator[Peer]:
        own = torch.arange(x.cu[-1]).chunk(self.P)[self.rank]
        if self.ring is not None:
            yield Peer("ring-flash-attn", own, lambda *t: self.ring.ring_flash_attn_func(*t, causal=False))
        if self.xdit is not None:
            yield Peer("xDiT ring", own, lambda *t: self.xdit.xdit_ring_flash_attn_func(*t, causal=False))
        if x.kernel in OF_DIFFUSERS and x.heads[0] == x.heads[1]:
            for name, degrees in self.degrees.items():
                how = dict(backend=OF_DIFFUSERS[x.kernel], parallel_config=degrees)
                yield Peer(name, own, lambda *t, how=how: self.diffusers.dispatch_attention_fn(*t, **how))
        if self.fast is not None and not any(h % self.P for h in x.heads):
            yield Peer("fast-ulysses", own, lambda *t: self._fast_ulysses(x.kernel, *t))

    def _fast_ulysses(self, kernel: str, *tensors: Tensor) -> Tensor:
        q, k, v = (self.fast.all_to_all_4d(x, mode=0) for x in tensors)
        return self.fast.all_to_all_4d(attention(q, k, v, causal=False, backend=kernel).o, mode=1)

    def _degrees(self) -> dict[str, Any]:
        """Diffusers' ways, by a row's title."""
        from diffusers import ContextParallelConfig
        from diffusers.models._modeling_parallel import ParallelConfig
        from torch.distributed.device_mesh import init_device_mesh

        out = {}
        for name, degrees in (("ring", (self.P, 1)), ("ulysses", (1, self.P))):
            config = ParallelConfig(ContextParallelConfig(*degrees))
            mesh = init_device_mesh(str(self.device)[:4], degrees, mesh_dim_names=("ring", "ulysses"))
            config.setup(self.rank, self.P, self.device, mesh=mesh)
            out[f"Diffusers {name}"] = config
        return out

    def _zigzag_of_each_document(self, cu: list[int]) -> Peer:
        theirs = self.ring.zigzag_ring_flash_attn_varlen_func
        spans = list(itertools.pairwise(cu))
        tokens = torch.cat([zigzag(a, b, self.rank, self.P) for a, b in spans])
        local = torch.tensor(cu, dtype=torch.int32, device=self.device) // self.P
        longest = max(b - a for a, b in spans) // self.P
        return Peer(
            "ring-flash-attn zigzag varlen",
            tokens,
            lambda *x: theirs(*(t[0] for t in x), local, longest, causal=True)[None],
        )

    def _llama3(self, cu: list[int], window: int) -> Peer:
        theirs, offsets = self.ring.llama3_flash_attn_varlen_func, torch.tensor(cu, dtype=torch.int32)
        q, k, *rest = self.ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, self.rank, self.P)
        lengths, keys = (q.to(self.device), k.to(self.device), *rest[:2]), rest[2]
        how = dict(heads_k_stride=8, local_k_slice=keys, causal=True, window_size=(window, 0 if window >= 0 else -1))
        return Peer(
            "ring-flash-attn llama3 varlen",
            torch.arange(cu[-1]).chunk(self.P)[self.rank],
            lambda *x: theirs(*(t[0] for t in x), *lengths, **how)[None],
        )


def _on(kernel: str, call: Call) -> Call:
    """A call whose lent functions run on this kernel, its backward pass too if no other call is between."""

    def run(*tensors: Tensor) -> Tensor:
        use(kernel)
        return call(*tensors)

    return run
