"""The flash-attn package, versions 2 (2.7 and later), 3 (Hopper build, or its forward alone) and 4 (CuTe DSL), through
their block functions.

Signatures are those of flash-attn 2.8.3, fa3-fwd 0.0.3 and flash-attn-4 4.0.0b36, which have run on an H200
(`tests/gpu/test_flash_attn.py`); elsewhere the adapters are tested against stand-ins with these signatures. Version 3's
Hopper build was not to be had: it is taken only where a call names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kernels import gpu
from ..scores import Scores
from .backend import Ask, QueryRows
from .packs import Pack
from .varlen import VarlenBackend, Window, enough_rows


class FlashAttnPackage(VarlenBackend):
    """flash_attn.flash_attn_interface.

    Args:
        repeatable: whether its gradients must be the same bits in every run, which takes it longer; also so under
            ``torch.use_deterministic_algorithms``.
    """

    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"
    knows = frozenset({"softcap"})

    def __init__(self, repeatable: bool = False) -> None:
        self._repeatable = repeatable

    def asked(self, ask: Ask) -> FlashAttnPackage:
        return type(self)(repeatable=True) if ask.repeatable else self

    @property
    def repeatable(self) -> bool:
        """Whether gradients are to be the same bits in every run."""
        return self._repeatable or torch.are_deterministic_algorithms_enabled()

    def unsupported(self, ask: Ask) -> str:
        return super().unsupported(ask) or missing(self.module)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        interface = self.interface
        how = (0.0, scores.scale, window.causal, *_sides(window), scores.softcap, None, False)
        if pack is None:
            return interface._flash_attn_forward(q, k, v, *how)[:2]
        o, lse = interface._flash_attn_varlen_forward(q[0], k[0], v[0], *_lengths(pack), *how)[:2]
        return o[None], lse[None]

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        interface = self.interface
        how = (0.0, scores.scale, window.causal, *_sides(window), scores.softcap, None, self.repeatable)
        inputs, grads = (x.do, x.q, k, v, x.o, x.lse), _room_for(x.q, k, v)
        if pack is None:
            interface._flash_attn_backward(*inputs, *grads, *how)
        else:
            inside = (t[0] for t in (*inputs, *grads))
            interface._flash_attn_varlen_backward(*inside, *_lengths(pack), *how)
        return grads

    def suits(self, ask: Ask) -> bool:
        """Also where a softcap leaves the Triton kernel behind it on Hopper (by 15 to 18 %)."""
        return super().suits(ask) or "softcap" in ask.beyond

    @property
    def interface(self) -> ModuleType:
        return import_module(self.module)


class FlashAttnHopper(FlashAttnPackage):
    """flash_attn_interface, the Hopper build."""

    name = "flash_attn_3"
    module = "flash_attn_interface"

    def suits(self, ask: Ask) -> bool:
        return False

    def _descales(self, pack: Pack | None, *tensors: Tensor) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The tensors as the kernel takes them, and their scales if they are rounded."""
        return tensors, {}

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        tensors, descales = self._descales(pack, q, k, v)
        q, k, v = (x if pack is None else x[0] for x in tensors)
        left, right = _sides(window)
        how: dict[str, Any] = dict(
            softmax_scale=scores.scale, causal=window.causal, window_size_left=left, window_size_right=right
        )
        how |= dict(softcap=scores.softcap, **_offsets(pack), **descales)
        o, lse = self.interface._flash_attn_forward(q, k, v, **how)[:2]
        return (o, lse) if pack is None else (o[None], lse[None])

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = _sides(window)
        how = dict(softmax_scale=scores.scale, is_causal=window.causal, window_size_left=left, window_size_right=right)
        how |= dict(softcap=scores.softcap, deterministic=self.repeatable, **_offsets(pack))
        grads = _room_for(x.q, k, v)
        tensors = (x.do, x.q, k, v, x.o, x.lse, *grads)
        *inputs, dq, dk, dv = (t if pack is None else t[0] for t in tensors)
        self.interface._flash_attn_backward(*inputs, dq=dq, dk=dk, dv=dv, **how)
        return grads


class FlashAttnHopperForward(FlashAttnHopper):
    """fa3_fwd_interface: the forward pass of the Hopper build, compiled without fp16 and without windows."""

    name = "fa3_fwd"
    module = "fa3_fwd_interface"
    forward_only = True

    def unsupported(self, ask: Ask) -> str:
        if ask.windowed:
            return "it was built without windows"
        if ask.dtype == torch.float16:
            return "it was built without fp16"
        return super().unsupported(ask)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        if max(window.left, window.right) >= 0:
            raise AssertionError(f"a mask that only a window names: {window}")
        return super().call(q, k, v, scores, window, pack)

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise UnsupportedError("backend", "a kernel with gradients", repr(self.name))


class FlashAttnHopperFP8(FlashAttnHopperForward):
    """The same kernel on queries, keys and values in FP8 (e4m3), each rounded with a scale for a batch row and key
    head: ``x ≈ s · round(x / s)``, s = max |x| / 448. Of a block of a ring each rank's keys have their own scales.

    Slower than the same kernel in bf16, as PyTorch rounds the inputs, and less exact: a call takes it only where it
    names it.
    """

    name = "fa3_fwd_fp8"

    def _descales(self, pack: Pack | None, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        groups, low, scales = tensors[1].shape[2], [], {}
        for name, x in zip("qkv", tensors):
            by_group = x.unflatten(2, (groups, -1))
            scale = by_group.abs().amax((1, 3, 4)).float().clamp_min(FP8.tiny) / FP8.max  # [B, Hk]
            rounded = (by_group / scale[:, None, :, None, None]).clamp(FP8.min, FP8.max).to(torch.float8_e4m3fn)
            low.append(rounded.flatten(2, 3))
            scales[f"{name}_descale"] = scale if pack is None else scale.expand(len(pack.q.cu) - 1, -1)
        return low, scales


FP8 = torch.finfo(torch.float8_e4m3fn)


class FlashAttnCuTe(FlashAttnPackage):
    """flash_attn.cute.interface of the distribution flash-attn-4. (That of flash-attn 2 brings an older one, which has
    neither varlen nor windows backwards.)

    The first call of a mask and head width compiles for some seconds.
    """

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"

    def unsupported(self, ask: Ask) -> str:
        if cute_beta() < LEAST_BETA:
            return f"flash-attn-4 4.0.0b{LEAST_BETA} or later is not installed"
        return super().unsupported(ask)

    def suits(self, ask: Ask) -> bool:
        """On Hopper at K = 128, where it was measured, it is the fastest but for few queries. Of documents Triton's is
        the faster kernel, measured before they went in one call."""
        return gpu.is_hopper(ask.device) and ask.width == 128 and not ask.packed and enough_rows(ask)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x if pack is None else x[0] for x in (q, k, v))
        how = _named_mask(scores, window) | _offsets(pack)
        o, lse = self.interface._flash_attn_fwd(q, k, v, return_lse=True, **how)[:2]
        return (o, lse) if pack is None else (o[None], lse[None])

    def call_backward(
        self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, window: Window, pack: Pack | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (t if pack is None else t[0] for t in (x.q, k, v, x.o, x.do, x.lse))
        how = _named_mask(scores, window) | _offsets(pack)
        dq, dk, dv = self.interface._flash_attn_bwd(*inputs, deterministic=self.repeatable, **how)[:3]
        return (dq, dk, dv) if pack is None else (dq[None], dk[None], dv[None])


LEAST_BETA = 36
"""The beta of flash-attn-4 4.0.0 that has run with ring_la."""


@cache
def cute_beta() -> int:
    """The number of the beta of flash-attn-4 4.0.0 that is installed, a large one for what came after; −1: none is."""
    try:
        release = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return -1
    beta = re.fullmatch(r"4\.0\.0b(\d+)", release)
    return 10**6 if beta is None else int(beta[1])


def _named_mask(scores: Scores, window: Window) -> dict[str, Any]:
    """Version 4's keywords: no side of a window is None, where the others have −1."""
    left, right = (None if side < 0 else side for side in (window.left, window.right))
    mask = dict(causal=window.causal, window_size_left=left, window_size_right=right)
    return dict(softmax_scale=scores.scale, softcap=scores.softcap, **mask)


def _room_for(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A contiguous gradient for each."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def missing(module: str) -> str:
    """Why a module cannot be imported, or ""."""
    try:
        there = find_spec(module) is not None
    except ModuleNotFoundError as e:  # of the package above it, or of what that imports
        if e.name is not None and e.name.partition(".")[0] != module.partition(".")[0]:
            return f"{module} cannot be imported: {e.name} is not installed"
        there = False
    return "" if there else f"{module} is not installed"


def _sides(window: Window) -> tuple[int, int]:
    """flash-attn's window: causal is a right side of 0."""
    return window.left, 0 if window.causal else window.right


def _lengths(pack: Pack) -> tuple[Tensor, Tensor, int, int]:
    return pack.q.cu, pack.k.cu, pack.q.longest, pack.k.longest


def _offsets(pack: Pack | None) -> dict[str, Any]:
    if pack is None:
        return {}
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _lengths(pack)))
