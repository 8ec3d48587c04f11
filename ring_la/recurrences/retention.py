"""Retention and lightning attention: one static decay a head. Simple GLA is the same with a gate a token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..algebra import Rule
from ..autograd import traced
from ..checks import check_depth, is_floats
from ..errors import ArgumentError, describe_tensor
from ..kernels import Inputs, state_dtype
from .arguments import DECAY, KEY, QUERY, VALUE, Argument
from .definition import Recurrence
from .recurrence import recurrence

RULE = Rule("additive", "scalar")
STATIC = Argument("H", "log decay")


def retention_decay(heads: int, device: torch.device | None = None) -> Tensor:
    """RetNet's log-decays ``log(1 − 2^(−5−h))``, h = 0 … H−1 (Sun et al. 2023, eq. 8), fp64 ``[H]``."""
    exponents = torch.arange(-5, -5 - heads, -1, dtype=torch.float64, device=device)
    return exponents.exp2_().neg_().log1p_()  # in place: a launch takes the host longer than the GPU


def lightning_decay(heads: int, layer_idx: int = 0, num_layers: int = 1, device: torch.device | None = None) -> Tensor:
    """TransNormerLLM's log-decays ``−(8h/H)(1 − layer_idx/num_layers)``, h = 0 … H−1, fp64 ``[H]``."""
    check_depth(layer_idx, num_layers)
    return -(8 / heads) * (1 - layer_idx / num_layers) * torch.arange(heads, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=256)
def _numbers(decay: Callable[..., Tensor], *arguments: int) -> tuple[float, ...]:
    """A paper's log-decays as numbers of the host."""
    return tuple(decay(*arguments, device=torch.device("cpu")).tolist())


@functools.lru_cache(maxsize=64)
def _made(
    decay: Callable[..., Tensor], arguments: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    """A paper's log-decays on a device, once for a stream: what one stream makes another may read too early."""
    with torch.inference_mode(False):
        return decay(*arguments, device=device).to(dtype)


@functools.lru_cache(maxsize=256)
def _spread(B: int, T: int, *made: Hashable) -> Tensor:
    """`_made` as a gate of every token."""
    with torch.inference_mode(False):
        return _made(*made).expand(B, T, -1)


def _default(decay: Callable[..., Tensor], v: Tensor, *arguments: int) -> Tensor:
    """A paper's log-decays as a gate of every token of values `v`, in the precision of the states."""
    device, dtype = v.device, state_dtype(v)
    cuda = v.is_cuda
    if traced(v) or (cuda and torch.cuda.is_current_stream_capturing()):  # memory of a trace or a graph is not kept
        return _static(decay(*arguments, device=device), v)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if cuda else 0  # the public way takes microseconds
    return _spread(*v.shape[:2], decay, arguments, dtype, device, stream)


def _static(g: Tensor, v: Tensor) -> Tensor:
    """One log-decay a head as a gate of every token, in the precision of the states."""
    if not is_floats(v, 4):
        raise ArgumentError("v", "a float tensor [B, T, H, V]", describe_tensor(v))
    if not is_floats(g, 1):
        raise ArgumentError("g", "one static log-decay a head, a float tensor [H]", describe_tensor(g))
    return g.to(state_dtype(v)).expand(*v.shape[:2], -1)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay: Callable[..., Tensor], *arguments: int
) -> Recurrence:
    """With the caller's log-decays `g`, or a paper's ``decay(H, *arguments)``."""
    if g is not None or not is_floats(v, 4):
        return Recurrence(RULE, Inputs(q, k, v, _static(g, v)), decays=g)  # type: ignore[arg-type]
    if not v.shape[2]:
        raise ArgumentError("v", "at least one head", list(v.shape))
    arguments = (v.shape[2], *arguments)
    decays = functools.partial(_numbers, decay, *arguments)
    return Recurrence(RULE, Inputs(q, k, v, _default(decay, v, *arguments)), decays=decays)


@recurrence(
    paper="RetNet, Sun et al. 2023, arXiv 2307.08621, eq. 6 and 8",
    equation="S ← γ S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=STATIC),
)
def retention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> Recurrence:
    """Retention: S ← γ_h S + k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        g: static log-decay ``log γ_h``, ``[H]``, ≤ 0; None: the paper's γ_h = 1 − 2^(−5−h), h = 0 … H−1.
    """
    return _recurrence(q, k, v, g, retention_decay)


@recurrence(
    paper="Qin et al. 2024, arXiv 2401.04658",
    equation="S ← λ S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=STATIC),
)
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, layer_idx: int = 0, num_layers: int = 1
) -> Recurrence:
    """Lightning attention: S ← λ_h S + k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        g: static log-decay ``log λ_h``, ``[H]``, ≤ 0; None: the paper's −(8h/H)(1 − layer_idx/num_layers),
            h = 0 … H−1 (TransNormerLLM, arXiv 2307.14995). Released MiniMax and Ling models use ALiBi slopes
            instead: pass them.
        layer_idx, num_layers: the layer the default decay is for; not beside a `g`.
    """
    check_depth(layer_idx, num_layers)
    if g is not None and (layer_idx, num_layers) != (0, 1):
        raise ArgumentError("layer_idx", "none beside g, which is the layer's own decay", repr(layer_idx))
    return _recurrence(q, k, v, g, lightning_decay, layer_idx, num_layers)


@recurrence(
    paper="Yang et al. 2023, arXiv 2312.06635, with a scalar gate",
    equation="S ← e^g S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY),
)
def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> Recurrence:
    """Gated linear attention with one gate a head: S ← exp(g) S + k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        g: log-decay ``[B, T, H]``, ≤ 0; None: no decay (and no gradient).
    """
    return Recurrence(Rule("additive", "none" if g is None else "scalar"), Inputs(q, k, v, g))
