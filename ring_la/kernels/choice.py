"""Which backend runs a recurrence: the PyTorch one anywhere, the Triton one where it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algebra import Rule
from ..errors import ArgumentError, UnsupportedError
from . import strength
from .other_side import OtherSide
from .protocol import PLAIN, Inputs, Local, OutputUse
from .pytorch.canonical import CanonicalRecurrence
from .pytorch.chunked import CanonicalChunks, ChunkedRecurrence
from .pytorch.recurrent import TokenRecurrence
from .pytorch.sums import PlainSums

if TYPE_CHECKING:
    from .recurrent import TritonTokens
    from .replay import Replay
    from .sums.recurrence import GatedSums

MODES = ("auto", "chunk", "recurrent")
BACKENDS = (None, "triton", "torch", "reference")
SHORT = 4
"""mode="auto" goes token by token up to this many tokens."""


def check_choice(mode: str, backend: str | None) -> None:
    """Refuse an unknown mode or backend by name."""
    if mode not in MODES:
        raise ArgumentError("mode", f"one of {', '.join(MODES)}", repr(mode))
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(map(repr, BACKENDS))}", repr(backend))


def unsupported(rule: Rule, inputs: Inputs, recurrent: bool = False) -> str:
    """Why Triton cannot run this, in chunks or (`recurrent`) token by token, or an empty string."""
    if not inputs.q.is_cuda:
        return "tensors are not on a CUDA device"
    if not triton_installed():
        return "triton is not installed"
    return _triton_tokens()[0](inputs) if recurrent else _triton()[0](rule, inputs)


@functools.cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _triton() -> tuple[Callable[[Rule, Inputs], str], type[Replay]]:
    """Why Triton's backend cannot run a call, and the backend."""
    from .families import unsupported
    from .replay import Replay

    return unsupported, Replay


@functools.cache
def _triton_tokens() -> tuple[Callable[[Inputs], str], type[TritonTokens]]:
    """The same of the recurrent mode, which takes every rule."""
    from .recurrent import TritonTokens, unsupported

    return unsupported, TritonTokens


@functools.cache
def _sums() -> tuple[Callable[[Inputs], str], type[GatedSums]]:
    """The same of the rule "sum"."""
    from .sums.recurrence import GatedSums, unsupported

    return unsupported, GatedSums


def _unsupported_sums(inputs: Inputs) -> str:
    """Why the kernels of the rule "sum" cannot run this, or an empty string."""
    if not inputs.q.is_cuda or not triton_installed():
        return "tensors are not on a CUDA device, or triton is not installed"
    return _sums()[0](inputs)


def make_local(
    rule: Rule,
    inputs: Inputs,
    cu: Tensor | None,
    scale: float,
    mode: str = "auto",
    backend: str | None = None,
    use: OutputUse = PLAIN,
    canonical: CanonicalChunks | None = None,
) -> Local[Any, Any]:
    """The backend object for one rank's tokens. `canonical`, for results that do not depend on the split, is for
    PyTorch's.

    Raises:
        UnsupportedError: backend="triton" was asked for and cannot run this.
    """
    if rule.reads == "values":
        by_keys = functools.partial(make_local, rule.by_keys, mode="chunk", backend=backend, canonical=canonical)
        short = canonical is None and (mode == "recurrent" or (mode == "auto" and inputs.q.shape[1] <= SHORT))
        tokens = TokenRecurrence(rule, inputs, cu, scale) if short else None
        return OtherSide(functools.partial(by_keys, cu=cu, scale=scale), inputs, tokens, use.final)
    if rule.write == "sum":
        if backend != "torch" and canonical is None and not _unsupported_sums(inputs):
            return _sums()[1](rule, inputs, cu, scale, use)
        if canonical is None and (backend == "torch" or (backend is None and not inputs.q.is_cuda)):
            return PlainSums(rule, inputs, cu, scale)
        rule, ones = Rule("additive", rule.decay), torch.ones_like(inputs.q)  # with keys and queries of ones it is it
        inputs = inputs._replace(q=ones, k=ones)
    recurrent = mode == "recurrent" or (mode == "auto" and inputs.q.shape[1] <= SHORT)
    if strength.given(rule, inputs):
        chunks = not recurrent and backend != "torch" and canonical is None and not unsupported(rule, inputs)
        if not (chunks and strength.read(rule, inputs)):
            without = functools.partial(
                make_local, rule, cu=cu, scale=scale, mode=mode, backend=backend, use=use, canonical=canonical
            )
            return strength.Strengthened(without, inputs)
    if recurrent and backend != "torch" and canonical is None and not unsupported(rule, inputs, recurrent=True):
        chunked = functools.partial(make_local, rule, inputs, cu, scale, "chunk", backend)
        return _triton_tokens()[1](rule, inputs, cu, scale, chunked, use.in_place)
    if backend != "torch":
        fixed = "deterministic=True fixes the PyTorch backend's chunks"
        why = unsupported(rule, inputs) if canonical is None else fixed
        if not why:
            return _triton()[1](rule, inputs, cu, scale, use)
        if backend == "triton":
            raise UnsupportedError("backend", "one that can run this", f"'triton': {why}", "Use backend='torch'")
    kind = TokenRecurrence if recurrent else ChunkedRecurrence if canonical is None else CanonicalRecurrence
    return kind(rule, inputs, cu, scale, canonical)
