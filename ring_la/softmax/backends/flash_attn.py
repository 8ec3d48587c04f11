"""The flash-attn package, versions 2 (2.7 and later), 3 (Hopper build) and 4 (CuTe DSL), through their block functions.

Signatures are those of each version's source; the adapters are tested against stand-ins with these signatures. Versions
3 and 4 have not been run with ring_la, so a call takes them only where it names them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .backend import Ask, QueryRows
from .packs import Pack
from .varlen import VarlenBackend, Window


class FlashAttnPackage(VarlenBackend):
    """flash_attn.flash_attn_interface."""

    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"

    def unsupported(self, ask: Ask) -> str:
        why = super().unsupported(ask)
        if why or installed(self.module):
            return why
        return f"{self.module} is not installed"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        interface = self.interface
        how = (0.0, scale, window.causal, *_sides(window), 0.0, None, False)
        if pack is None:
            return interface._flash_attn_forward(q, k, v, *how)[:2]
        o, lse = interface._flash_attn_varlen_forward(q[0], k[0], v[0], *_lengths(pack), *how)[:2]
        return o[None], lse[None]

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        interface = self.interface
        how = (0.0, scale, window.causal, *_sides(window), 0.0, None, True)
        inputs, grads = (x.do, x.q, k, v, x.o, x.lse), _room_for(x.q, k, v)
        if pack is None:
            interface._flash_attn_backward(*inputs, *grads, *how)
        else:
            inside = (t[0] for t in (*inputs, *grads))
            interface._flash_attn_varlen_backward(*inside, *_lengths(pack), *how)
        return grads

    @property
    def interface(self) -> ModuleType:
        return import_module(self.module)


class FlashAttnHopper(FlashAttnPackage):
    """flash_attn_interface, the Hopper build."""

    name = "flash_attn_3"
    module = "flash_attn_interface"

    def suits(self, ask: Ask) -> bool:
        return False

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x if pack is None else x[0] for x in (q, k, v))
        left, right = _sides(window)
        how = dict(softmax_scale=scale, causal=window.causal, window_size_left=left, window_size_right=right)
        o, lse = self.interface._flash_attn_forward(q, k, v, **_offsets(pack), **how)[:2]
        return (o, lse) if pack is None else (o[None], lse[None])

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = _sides(window)
        how = dict(softmax_scale=scale, is_causal=window.causal, window_size_left=left, window_size_right=right)
        grads = _room_for(x.q, k, v)
        tensors = (x.do, x.q, k, v, x.o, x.lse, *grads)
        *inputs, dq, dk, dv = (t if pack is None else t[0] for t in tensors)
        self.interface._flash_attn_backward(*inputs, dq=dq, dk=dk, dv=dv, deterministic=True, **_offsets(pack), **how)
        return grads


class FlashAttnCuTe(FlashAttnPackage):
    """flash_attn.cute.interface. On Hopper its backward has neither varlen nor windows."""

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    joins_tiles = False

    def unsupported(self, ask: Ask) -> str:
        if ask.windowed:
            return "its backward has no sliding window on Hopper"
        if ask.repeatable:
            return "its backward is not repeatable on Hopper"
        return super().unsupported(ask)

    def suits(self, ask: Ask) -> bool:
        return False

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        o, lse = self.interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=window.causal, return_lse=True)[:2]
        return o, lse

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scale: float, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (x.q, k, v, x.o, x.do, x.lse)
        grads = self.interface._flash_attn_bwd(*inputs, softmax_scale=scale, causal=window.causal)
        return tuple(grads[:3])


def _room_for(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A contiguous gradient for each."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _sides(window: Window) -> tuple[int, int]:
    """flash-attn's window: causal is a right side of 0."""
    return window.left, 0 if window.causal else window.right


def _lengths(pack: Pack) -> tuple[Tensor, Tensor, int, int]:
    return pack.q.cu, pack.k.cu, pack.q.longest, pack.k.longest


def _offsets(pack: Pack | None) -> dict[str, Any]:
    if pack is None:
        return {}
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _lengths(pack)))
