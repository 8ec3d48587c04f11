"""Diagonal plus low rank: the general delta rule, and RWKV-7."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..algebra import Rule
from ..kernels import Inputs
from .arguments import CHANNEL_DECAY, KEY, QUERY, VALUE, Argument
from .definition import Recurrence
from .recurrence import recurrence


def _replaced(normal: Callable[..., Tensor], drawn: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Part of what `a` removes comes back elsewhere, as in RWKV-7."""
    return -drawn["a"] * normal(*shape).sigmoid()


REMOVED, REPLACED = Argument("BTHK", "unit"), Argument("BTHK", _replaced)


@recurrence(
    paper="Peng et al. 2025, arXiv 2503.14456, eq. 1",
    equation="S ← (diag(e^g) + b aᵀ) S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, a=REMOVED, b=REPLACED, g=CHANNEL_DECAY),
)
def dplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> Recurrence:
    """The generalised delta rule: S ← (diag(exp g) + b aᵀ) S + k vᵀ.

    `a` reads the state before the token's decay.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        a, b: ``[B, T, H, K]`` (or Hk heads). g: log-decay of each key channel, the same, ≤ 0.
    """
    return Recurrence(Rule("dplr", "diagonal"), Inputs(q, k, v, g, None, a, b))


@recurrence(
    paper="Peng et al. 2025, arXiv 2503.14456, eq. 17",
    equation="S ← (diag(e^w) + b aᵀ) S + k vᵀ",
    arguments=dict(r=QUERY, w=CHANNEL_DECAY, k=KEY, v=VALUE, a=REMOVED, b=REPLACED),
)
def rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, lower_bound: float | None = None
) -> Recurrence:
    """RWKV-7: S ← (diag(exp w) + b aᵀ) S + k vᵀ, o = scale · Sᵀ r.

    The paper has no scale: pass ``scale=1.0`` for its form.

    Args:
        r, k: ``[B, T, Hk, K]``, receptance and key. v: ``[B, T, H, V]`` with H a multiple of Hk.
        w: log-decay ``[B, T, H, K]``, ≤ 0. a, b: ``[B, T, H, K]``; in the paper ``a = −κ̂`` and ``b = κ̂ ⊙ a``.
        lower_bound: a number that w never falls below, such as the −0.607 of the paper's ``−e^−½ · sigmoid(x)``; None:
            not known. With one of at least −0.639, bf16 (w, too) and heads of 128, Hopper GPUs take faster kernels.
            Outputs do not depend on it; where gates break the promise they may be NaN.
    """
    return Recurrence(Rule("dplr", "diagonal", lower_bound), Inputs(r, k, v, w, None, a, b), names={"q": "r", "g": "w"})
