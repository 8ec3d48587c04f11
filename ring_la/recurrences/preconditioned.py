"""Preconditioned delta rules: the key that writes is scaled by how much its channels have been written before.

    A ← e^h A + α k²            per key channel: gated linear attention with one key
    k̂ = k ⊙ base^(−s),  s = r / (1 + |r|),  r = log(A + ε) − center
    S ← D S + β k̂ (v − (D S)ᵀ k)ᵀ

so that k erases and k̂ writes (`erase`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..blockwise import by_block
from ..checks import is_finite
from ..errors import ArgumentError, describe_tensor
from ..kernels import Inputs
from ..kernels.fused.precondition import can_precondition, precondition
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import CHANNEL_DECAY, DECAY, KEY, QUERY, RATE, VALUE, Argument
from .definition import CommonOptions
from .erase import erase_and_write, keys_of
from .recurrence import recurrence
from .retention import simple_gla

EPS = 1e-6
SHARED = Argument("BTH", "log decay"), Argument("BTH", "rate"), Argument("H")


def token(
    states: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    h: Tensor,
    alpha: Tensor,
    center: Tensor,
    base: float,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One token of either."""
    S, A = states
    A = h.exp()[..., None] * A + alpha[..., None] * k**2
    r = torch.log(A + EPS) - center[..., None]
    written = k * torch.exp(-math.log(base) * r / (1 + r.abs()))
    S = S * (g.exp()[..., None, None] if g.dim() == 2 else g.exp()[..., None])
    S = S + outer(beta[..., None] * written, v - read(S, k))
    return (S, A), read(S, q)


class Preconditioner(NamedTuple):
    """What says how much channels have been written: log-decay h and weight α ``[B, T, H]``, center ``[H]``, base."""

    h: Tensor
    alpha: Tensor
    center: Tensor
    base: float


def _preconditioned(inputs: Inputs, by: Preconditioner, options: CommonOptions) -> LinearAttentionOutput:
    q, k, v, g, beta, *_ = inputs
    if not is_finite(by.base) or by.base <= 1:
        raise ArgumentError("base", "a finite number above 1", describe_tensor(by.base))
    S, A = (None, None) if options.initial_state is None else options.initial_state
    heads, layout = v.shape[2], options.layout
    alone = layout is None and options.backend in (None, "triton")
    if alone and can_precondition(k, by.h, by.alpha, by.center):
        written, A = precondition(k, by.h, by.alpha, by.center, A, options.cu_seqlens, by.base, EPS)
    else:
        written, A = _by_parts(k, heads, by, A, options)
    q, k = by_block(lambda *x: tuple(keys_of(heads, t) for t in x), q, k, layout=layout)
    o, S = erase_and_write(Inputs(q, written, v, g, beta, k), options._replace(initial_state=S))
    return LinearAttentionOutput(o, (S, A) if options.output_final_state else None)  # type: ignore[arg-type]


def _by_parts(
    k: Tensor, heads: int, by: Preconditioner, A: Tensor | None, options: CommonOptions
) -> tuple[Tensor, Tensor | None]:
    """What `precondition` gives: A as gated linear attention with one key, and PyTorch's operations."""
    h, alpha, center, base = by
    wide, layout = torch.promote_types(k.dtype, torch.float32), options.layout

    def squared(alpha: Tensor, k: Tensor) -> Tensor:
        return alpha[..., None].to(wide) * keys_of(heads, k).to(wide) ** 2

    one = k.new_ones(1, 1, 1, 1, dtype=wide).expand(*h.shape, 1)
    seen = simple_gla(
        one, one, by_block(squared, alpha, k, layout=layout), h, scale=1.0,
        initial_state=None if A is None else A[..., None, :], output_final_state=options.output_final_state,
        **options.scan,
    )  # fmt: skip

    def scaled(seen: Tensor, k: Tensor, center: Tensor) -> Tensor:
        k = keys_of(heads, k)
        r = torch.log(seen + EPS) - center.to(wide)[..., None]
        return (k * torch.exp(-math.log(base) * r / (1 + r.abs()))).to(k.dtype)

    written = by_block(scaled, seen.o, k, layout=layout, shared=(center,))
    return written, None if seen.final_state is None else seen.final_state[..., 0, :]


@recurrence(
    paper="the preconditioned gated delta rule of fla-core 0.6.0's ops/precond_gated_delta_rule",
    equation="A ← e^h A + α k², S ← e^g (I − β k̂ kᵀ) S + β k̂ vᵀ, k̂ = k ⊙ f(A)",
    arguments=dict(zip(
        ("q", "k", "v", "g", "beta", "h", "alpha", "center"), (QUERY, KEY, VALUE, DECAY, RATE, *SHARED)
    )),
    token=token,
    states=("HKV", "HK"),
    flags=dict(base=1.5),
    same_bits=True,
)  # fmt: skip
def preconditioned_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor, alpha: Tensor, center: Tensor,
    base: float = 1.5, *, options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """The preconditioned gated delta rule: A ← e^h A + α k², S ← e^g (I − β k̂ kᵀ) S + β k̂ vᵀ.

    ``k̂ = k ⊙ base^(−r / (1 + |r|))`` with ``r = log(A + 1e-6) − center``: channels that were written often write less.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``.
        h: log-decay of A ``[B, T, H]``, ≤ 0. alpha: ``[B, T, H]``, ≥ 0. center: ``[H]``. base: a number above 1.
    """
    return _preconditioned(Inputs(q, k, v, g, beta), Preconditioner(h, alpha, center, base), options)


@recurrence(
    paper="the preconditioned KDA of fla-core 0.6.0's ops/precond_kda",
    equation="A ← e^h A + α k², S ← (I − β k̂ kᵀ) diag(e^g) S + β k̂ vᵀ, k̂ = k ⊙ f(A)",
    arguments=dict(zip(
        ("q", "k", "v", "g", "beta", "h", "alpha", "center"), (QUERY, KEY, VALUE, CHANNEL_DECAY, RATE, *SHARED)
    )),
    token=token,
    states=("HKV", "HK"),
    flags=dict(base=1.5),
    same_bits=True,
)  # fmt: skip
def preconditioned_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor, alpha: Tensor, center: Tensor,
    base: float = 1.5, *, options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """Preconditioned KDA: `preconditioned_gated_delta_rule` with a log-decay of each key channel ``g [B, T, H, K]``."""
    return _preconditioned(Inputs(q, k, v, g, beta), Preconditioner(h, alpha, center, base), options)
