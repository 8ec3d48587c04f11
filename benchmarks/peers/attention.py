"""Other libraries' split attention for `bench attention`: ring-flash-attn and yunchang, where they are installed.

Each states which tokens of the sequence a rank holds, so that its results can be compared with ours. Where flash-attn
is absent they run on PyTorch's FlashAttention-2.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

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


class Peers:
    """What is installed, on this rank of `P`; makes yunchang's groups once. Collective."""

    def __init__(self, rank: int, P: int) -> None:
        self.rank, self.P, self.layers = rank, P, []
        if importlib.util.find_spec("flash_attn") is None:
            use_pytorch_kernels_as_flash_attn()
        try:
            from yunchang import LongContextAttention, set_seq_parallel_pg
        except ImportError as e:
            print(f"without yunchang: {e}", flush=True)
            return
        for ulysses in sorted({1, max(1, P // 2)}):
            set_seq_parallel_pg(ulysses, P // ulysses, rank, P)
            self.layers.append((ulysses, P // ulysses, LongContextAttention(ring_impl_type="zigzag")))

    def of(self, cu: list[int], window: int, softcap: float) -> Iterator[Peer]:
        """Those that do causal attention of these documents with this window and softcap."""
        if softcap:
            return
        if len(cu) == 2 and window < 0:
            yield from self._yunchang(cu[-1])
        try:
            import ring_flash_attn
        except ImportError as e:
            print(f"without ring-flash-attn: {e}", flush=True)
            return
        if len(cu) == 2 and window < 0:
            dense = ring_flash_attn.zigzag_ring_flash_attn_func
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
        from ring_flash_attn import zigzag_ring_flash_attn_varlen_func as theirs

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
        from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

        offsets = torch.tensor(cu, dtype=torch.int32)
        q, k, *rest = llama3_flash_attn_prepare_cu_seqlens(offsets, True, self.rank, self.P)
        lengths, keys = (q.cuda(), k.cuda(), *rest[:2]), rest[2]
        how = dict(heads_k_stride=8, local_k_slice=keys, causal=True, window_size=(window, 0 if window >= 0 else -1))
        return Peer(
            "ring-flash-attn llama3 varlen",
            torch.arange(cu[-1]).chunk(self.P)[self.rank],
            lambda *x: llama3_flash_attn_varlen_func(*(t[0] for t in x), *lengths, **how)[None],
        )


def use_pytorch_kernels_as_flash_attn() -> None:
    """flash_attn's private entry points over PyTorch's FlashAttention-2, for peers without flash-attn."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.__path__ = "2.8.3", []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(package, name, _absent)
        setattr(interface, name, _absent)
    interface._flash_attn_forward, interface._flash_attn_backward = _forward, _backward
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = _varlen_forward, _varlen_backward
    package.flash_attn_interface = interface
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = _absent
    for module in (package, interface, adapters):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def _absent(*_, **__):
    raise NotImplementedError("not part of this benchmark")


def _bounds(left: int, right: int) -> dict:
    return dict(window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right)


def _forward(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    return _varlen_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size_left,
        window_size_right,
    )  # fmt: skip


def _varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    o, lse, rng, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, False,
        scale=softmax_scale, **_bounds(window_size_left, window_size_right),
    )  # fmt: skip
    return o, lse, None, rng


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    _varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale,
        causal, window_size_left, window_size_right,
    )  # fmt: skip


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The state of a random generator that nothing is drawn from."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        *_no_dropout(q.device), scale=softmax_scale,
        **_bounds(window_size_left, window_size_right),
    )  # fmt: skip
    for into, grad in zip((dq, dk, dv), grads):
        into.copy_(grad)
