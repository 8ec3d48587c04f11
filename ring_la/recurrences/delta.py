"""The delta rules: what the key already recalls is taken out before the new value is written."""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..kernels import Inputs
from .arguments import CHANNEL_DECAY, DECAY, KEY, QUERY, RATE, VALUE
from .definition import Recurrence
from .recurrence import recurrence


@recurrence(
    paper="Schlag et al. 2021; Yang et al. 2024, arXiv 2406.06484",
    equation="S ← (I − β k kᵀ) S + β k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, beta=RATE),
)
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Recurrence:
    """The delta rule: S ← (I − β k kᵀ) S + β k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, H, V]`` with H a multiple of Hk. beta: ``[B, T, H]``, in (0, 1), or (0, 2) for negative eigenvalues.
    """
    return Recurrence(Rule("delta", "none"), Inputs(q, k, v, beta=beta))


@recurrence(
    paper="Yang et al. 2024, arXiv 2412.06464, eq. 10",
    equation="S ← e^g (I − β k kᵀ) S + β k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY, beta=RATE),
)
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Recurrence:
    """The gated delta rule: S ← exp(g) (I − β k kᵀ) S + β k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``.
    """
    return Recurrence(Rule("delta", "scalar"), Inputs(q, k, v, g, beta))


@recurrence(
    paper="Kimi Team 2025, arXiv 2510.26692, eq. 1",
    equation="S ← (I − β k kᵀ) diag(e^g) S + β k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=CHANNEL_DECAY, beta=RATE),
)
def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lower_bound: float | None = None) -> Recurrence:
    """Kimi delta attention: S ← (I − β k kᵀ) diag(exp g) S + β k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay of each key channel ``[B, T, H, K]``, ≤ 0.
        beta: ``[B, T, H]``.
        lower_bound: a number that g never falls below, such as the -5 of a gate ``-5 · sigmoid(x)``; None: not known.
            With one of at least -5.125, bf16 and heads of 128, Hopper GPUs use kernels that are several times faster
            where gates forget. Outputs do not depend on it. Where gates break the promise, so that over 16 tokens those
            of a channel add up to less than -82, gradients are NaN.
    """
    return Recurrence(Rule("delta", "diagonal", lower_bound), Inputs(q, k, v, g, beta))
