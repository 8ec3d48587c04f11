"""Gated slot attention: M slots of keys and values that forget by one gate a slot, read by a softmax over slots.

    Hk ← Hk diag(e^g) + k sᵀ          scores = scale · Hkᵀ q
    Hv ← diag(e^g) Hv + s vᵀ          o = Hvᵀ softmax(scores)

The first state decays along its values: each slot is a value head, one number wide, with a decay of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import KEY, QUERY, VALUE, Argument
from .definition import CommonOptions
from .gla import gla
from .recurrence import recurrence
from .retention import simple_gla


def token(
    S: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One token of gated slot attention."""
    keys, values = S
    keys = keys * g.exp()[..., None, :] + outer(k, s)
    values = values * g.exp()[..., None] + outer(s, v)
    return (keys, values), read(values, read(keys, q).softmax(-1))


@recurrence(
    paper="Zhang et al. 2024, arXiv 2409.07146, eq. 5",
    equation="Hk ← Hk diag(e^g) + k sᵀ, Hv ← diag(e^g) Hv + s vᵀ, o = Hvᵀ softmax(Hkᵀ q)",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, s=Argument("BTHM", "rate"), g=Argument("BTHM", "log decay")),
    token=token,
    states=("HKM", "HMV"),
    sizes=dict(M=3),
)
def gated_slot_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """Gated slot attention: Hk ← Hk diag(e^g) + k sᵀ, Hv ← diag(e^g) Hv + s vᵀ, o = Hvᵀ softmax(scale · Hkᵀ q).

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        s: what a token writes into each slot ``[B, T, H, M]``; in the paper 1 − e^g.
        g: log-decay of each slot ``[B, T, H, M]``, ≤ 0.
    """
    first, second = (None, None) if options.initial_state is None else options.initial_state
    final, M = options.output_final_state, s.shape[-1]
    scores, keys = simple_gla(
        q, k, s.flatten(2)[..., None].to(q.dtype), g.flatten(2), scale=options.scale,
        initial_state=None if first is None else first.mT.flatten(1, 2)[..., None],
        output_final_state=final, **options.scan,
    )  # fmt: skip
    slots = scores[..., 0].unflatten(2, (-1, M)).softmax(-1)
    o, values = gla(slots, s.to(slots.dtype), v, g, scale=1.0, initial_state=second,
                    output_final_state=final, **options.scan)  # fmt: skip
    state: Any = (keys[..., 0].unflatten(1, (-1, M)).mT, values) if final else None  # type: ignore[index]
    return LinearAttentionOutput(o, state)
