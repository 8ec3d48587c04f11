"""Diagonal plus low rank: the general delta rule, and RWKV-7."""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..kernels import Inputs
from .definition import Recurrence
from .recurrence import recurrence


@recurrence(paper="Peng et al. 2025, arXiv 2503.14456, eq. 1")
def dplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> Recurrence:
    """The generalised delta rule: S ← (diag(exp g) + b aᵀ) S + k vᵀ.

    `a` reads the state before the token's decay.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        a, b: ``[B, T, H, K]`` (or Hk heads). g: log-decay of each key channel, the same, ≤ 0.
    """
    return Recurrence(Rule("dplr", "diagonal"), Inputs(q, k, v, g, None, a, b))


@recurrence(paper="Peng et al. 2025, arXiv 2503.14456, eq. 17")
def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Recurrence:
    """RWKV-7: S ← (diag(exp w) + b aᵀ) S + k vᵀ, o = scale · Sᵀ r.

    The paper has no scale: pass ``scale=1.0`` for its form.

    Args:
        r, k: ``[B, T, Hk, K]``, receptance and key. v: ``[B, T, H, V]`` with H a multiple of Hk.
        w: log-decay ``[B, T, H, K]``, ≤ 0. a, b: ``[B, T, H, K]``; in the paper ``a = −κ̂`` and ``b = κ̂ ⊙ a``.
    """
    return Recurrence(Rule("dplr", "diagonal"), Inputs(r, k, v, w, None, a, b), names={"q": "r", "g": "w"})
