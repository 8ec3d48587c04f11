"""Which backend runs a recurrence: the PyTorch one anywhere, the Triton one where it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

from ..algebra import Rule
from ..errors import ArgumentError, UnsupportedError
from .protocol import Inputs, Local
from .pytorch.chunked import ChunkedRecurrence
from .pytorch.recurrent import TokenRecurrence

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


def triton_refuses(rule: Rule, inputs: Inputs) -> str:
    """Why the Triton backend cannot run this, or an empty string."""
    if not inputs.q.is_cuda:
        return "tensors are not on a CUDA device"
    if not triton_installed():
        return "triton is not installed"
    return _triton()[0](rule, inputs) or ""


@functools.cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _triton() -> tuple[Callable, type[Local]]:
    """What Triton's backend refuses, and the backend."""
    from .segments.backend import unsupported
    from .segments.replay import Replay

    return unsupported, Replay


@functools.cache
def _triton_tokens() -> tuple[Callable, type[Local]]:
    """The same of the recurrent mode."""
    from .triton.recurrent import TritonTokens, unsupported

    return unsupported, TritonTokens


def triton_tokens_refuses(inputs: Inputs) -> str:
    """Why the Triton kernel of the recurrent mode cannot run this, or an empty string."""
    if not inputs.q.is_cuda:
        return "tensors are not on a CUDA device"
    if not triton_installed():
        return "triton is not installed"
    return _triton_tokens()[0](inputs)


def make_local(
    rule: Rule,
    inputs: Inputs,
    cu,
    scale: float,
    mode: str = "auto",
    backend: str | None = None,
    in_place: bool = False,
    kept: tuple[Tensor | None, ...] = (),
    keep: bool = False,
    final: bool = True,
    **canonical,
) -> Local:
    """The backend object for one rank's tokens.

    `keep`: `Local.kept` will be asked for; `kept` is what it gave, for the gradients. Not `final`: nobody wants the
    states that leave, and the output may give None for them. `in_place` allows the output to write the leaving states
    over the entering ones. `canonical` (chunk length and alignment, for results that do not
    depend on the split) is the PyTorch backend's.

    Raises:
        UnsupportedError: backend="triton" was asked for and cannot run this.
    """
    recurrent = mode == "recurrent" or (mode == "auto" and inputs.q.shape[1] <= SHORT)
    if recurrent and backend != "torch" and not canonical and not triton_tokens_refuses(inputs):
        chunked = functools.partial(make_local, rule, inputs, cu, scale, "chunk", backend)
        return _triton_tokens()[1](rule, inputs, cu, scale, chunked, in_place)
    if backend != "torch":
        why = "deterministic=True fixes the PyTorch backend's chunks" if canonical else triton_refuses(rule, inputs)
        if not why:
            return _triton()[1](rule, inputs, cu, scale, kept, keep, final)
        if backend == "triton":
            raise UnsupportedError("backend", "one that can run this", f"'triton': {why}", "Use backend='torch'")
    kind = TokenRecurrence if recurrent else ChunkedRecurrence
    return kind(rule, inputs, cu, scale, **canonical)
