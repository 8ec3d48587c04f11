"""Kernels of softmax attention, one file each, and which of them a call takes."""

from __future__ import annotations

from typing import TypeVar

from ...errors import ArgumentError, UnsupportedError
from ..merging import has_triton
from .aten import CuDNN, Flash
from .backend import Ask, AttentionBackend, QueryRows, TileBackend
from .chosen import ChosenBackend, TorchChosen
from .cpu_flash import CPUFlash
from .flash_attn import FlashAttnCuTe, FlashAttnHopper, FlashAttnHopperForward, FlashAttnHopperFP8, FlashAttnPackage
from .latents import FORMS, LatentBackend, cheaper_form
from .sage import SageAttention
from .torch_backend import TorchBackend
from .triton import BlockChosen, SortedChosen, TritonBackend, TritonChosen

_KERNELS = (
    FlashAttnCuTe(),
    CuDNN(),
    Flash(),
    FlashAttnPackage(),
    FlashAttnHopper(),
    FlashAttnHopperForward(),
    FlashAttnHopperFP8(),
    SageAttention(),
    TritonBackend(),
    CPUFlash(),
    TorchBackend(),
)
B = TypeVar("B", bound=AttentionBackend)

BACKENDS: dict[str, AttentionBackend] = {b.name: b for b in _KERNELS}
"""Every kernel by name, the fastest first: a call that names none takes the first that supports it."""


_CHOSEN_KERNELS = TritonChosen(), SortedChosen(), BlockChosen(), TorchChosen()
CHOSEN: dict[str, ChosenBackend] = {b.name: b for b in _CHOSEN_KERNELS}
"""Kernels for queries that choose their keys."""


def choose(ask: Ask, name: str | None) -> AttentionBackend:
    """The backend called `name`, or the fastest that can do `ask`.

    Raises:
        ArgumentError: there is no such backend. UnsupportedError: it cannot do this; the message says which can.
    """
    return _choose(BACKENDS, ask, name).asked(ask)


def choose_for_chosen(ask: Ask, name: str | None) -> ChosenBackend:
    """The same of `CHOSEN`."""
    return _choose(CHOSEN, ask, name)


def _choose(kernels: dict[str, B], ask: Ask, name: str | None) -> B:
    able = [b.name for b in kernels.values() if not b.unsupported(ask)]
    if not able:
        why = "; ".join(f"{b.name}: {b.unsupported(ask)}" for b in kernels.values())
        raise UnsupportedError("backend", "a kernel that can do this", why)
    if name is None:
        return next(b for b in kernels.values() if b.name in able and b.suits(ask))
    if name not in kernels:
        raise ArgumentError("backend", f"None or one of {', '.join(kernels)}, reference", repr(name))
    if name not in able:
        why = kernels[name].unsupported(ask)
        got = f"{name!r}: {why}"
        raise UnsupportedError("backend", "a kernel that can do this", got, f"These can: {', '.join(able)}")
    return kernels[name]


def exact(backend: AttentionBackend) -> AttentionBackend:
    """The kernel that does what `backend` does where Δ is not ``do·o``: a gradient flows into lse."""
    if backend.takes_delta:
        return backend
    return BACKENDS["triton"] if backend.name != "cpu_flash" and has_triton() else BACKENDS["torch"]


__all__ = [
    "BACKENDS",
    "CHOSEN",
    "FORMS",
    "Ask",
    "AttentionBackend",
    "ChosenBackend",
    "LatentBackend",
    "QueryRows",
    "TileBackend",
    "cheaper_form",
    "choose",
    "choose_for_chosen",
    "exact",
]
