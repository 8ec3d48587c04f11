"""Gated slot attention: M slots of keys and values that forget by one gate a slot, read by a softmax over slots.

    Hk ← Hk diag(e^g) + k sᵀ          scores = scale · Hkᵀ q
    Hv ← diag(e^g) Hv + s vᵀ          o = Hvᵀ softmax(scores)

The first state decays along its values, which are read: transposed it is gated linear attention with slots for keys and
keys for values, whose other side is read (`kernels.other_side`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..algebra import Rule
from ..blockwise import by_block
from ..kernels import Inputs
from ..kernels.fused.wide_softmax import softmax_in_fp32
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import KEY, QUERY, VALUE, Argument
from .definition import CommonOptions, Recurrence
from .erase import keys_of
from .recurrence import recurrence


@recurrence(paper="the keys of gated slot attention, transposed")
def _scores(q: Tensor, k: Tensor, s: Tensor, g: Tensor) -> Recurrence:
    """Hkᵀ ← diag(e^g) Hkᵀ + s kᵀ, scores = Hkᵀ q."""
    return Recurrence(Rule("additive", "diagonal", reads="values"), Inputs(q, s, k, g), names={"k": "s", "v": "k"})


@recurrence(paper="the values of gated slot attention")
def _read(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Recurrence:
    """Gated linear attention, q fp32."""
    return Recurrence(Rule("additive", "diagonal"), Inputs(q, k, v, g), names={"k": "s"}, wide_queries=True)


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
    same_bits=True,
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
    final, heads = options.output_final_state, v.shape[2]
    q, k = by_block(lambda *x: tuple(keys_of(heads, t) for t in x), q, k, layout=options.layout)
    scores, keys = _scores(
        q, k, s.to(q.dtype), g, scale=options.scale, initial_state=None if first is None else first.mT,
        output_final_state=final, **options.scan,
    )  # fmt: skip
    # in fp32, its gradient too: what slots have in common cancels between that and the scores' gradient
    weights = by_block(softmax_in_fp32, scores, layout=options.layout)
    o, values = _read(
        weights, s.to(v.dtype), v, g, scale=1.0, initial_state=second, output_final_state=final, **options.scan
    )
    state: Any = (keys.mT, values) if keys is not None else None
    return LinearAttentionOutput(o, state)
