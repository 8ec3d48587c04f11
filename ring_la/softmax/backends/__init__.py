"""Kernels of softmax attention, one file each, and which of them a call takes."""

from __future__ import annotations

from ...errors import ArgumentError, UnsupportedError
from ..merging import has_triton
from .aten import CuDNN, Flash
from .backend import Ask, AttentionBackend, QueryRows, TileBackend
from .cpu_flash import CPUFlash
from .flash_attn import FlashAttnCuTe, FlashAttnHopper, FlashAttnPackage
from .latents import FORMS, LatentBackend, cheaper_form
from .torch_backend import TorchBackend
from .triton import TritonBackend

_KERNELS = (
    CuDNN(),
    Flash(),
    FlashAttnPackage(),
    FlashAttnHopper(),
    FlashAttnCuTe(),
    TritonBackend(),
    CPUFlash(),
    TorchBackend(),
)
BACKENDS: dict[str, AttentionBackend] = {b.name: b for b in _KERNELS}
"""Every kernel by name, the fastest first: a call that names none takes the first that supports it."""


def choose(ask: Ask, name: str | None) -> AttentionBackend:
    """The backend called `name`, or the fastest that can do `ask`.

    Raises:
        ArgumentError: there is no such backend. UnsupportedError: it cannot do this; the message says which can.
    """
    if name is None:
        return next(b for b in BACKENDS.values() if not b.unsupported(ask) and b.suits(ask))
    if name not in BACKENDS:
        raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}, reference", repr(name))
    why = BACKENDS[name].unsupported(ask)
    if why:
        able = ", ".join(b.name for b in BACKENDS.values() if not b.unsupported(ask))
        raise UnsupportedError("backend", "a kernel that can do this", f"{name!r}: {why}", f"These can: {able}")
    return BACKENDS[name]


def exact(backend: AttentionBackend) -> AttentionBackend:
    """The kernel that does what `backend` does where Δ is not ``do·o``: a gradient flows into lse."""
    if backend.takes_delta:
        return backend
    return BACKENDS["triton"] if backend.name != "cpu_flash" and has_triton() else BACKENDS["torch"]


__all__ = [
    "BACKENDS",
    "FORMS",
    "Ask",
    "AttentionBackend",
    "LatentBackend",
    "QueryRows",
    "TileBackend",
    "cheaper_form",
    "choose",
    "exact",
]
