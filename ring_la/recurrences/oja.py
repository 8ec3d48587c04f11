"""Oja's rule with gates: a state that forgets and is corrected along its values, which are also what is read.

Transposed it is KDA with values for keys and keys for values, whose other side is read (`kernels.other_side`).
"""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..blockwise import by_block
from ..kernels import Inputs
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import KEY, QUERY, RATE, Argument
from .definition import CommonOptions, Recurrence
from .erase import keys_of
from .recurrence import recurrence


@recurrence(paper="Oja's rule, transposed")
def _transposed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Recurrence:
    """M ← (I − β v vᵀ) diag(e^g) M + β v kᵀ, o = M q."""
    return Recurrence(Rule("delta", "diagonal", reads="values"), Inputs(q, v, k, g, beta), names={"k": "v", "v": "k"})


def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated Oja rule."""
    S = S * g.exp()[..., None, :]
    missing = k - (S * v[..., None, :]).sum(-1)
    S = S + outer(missing, beta[..., None] * v)
    return S, read(S, q)


@recurrence(
    paper="the gated Oja rule of fla-core's ops/gated_oja_rule",
    equation="S ← S diag(e^g) (I − β v vᵀ) + β k vᵀ",
    arguments=dict(
        q=QUERY, k=KEY, v=Argument("BTHV", "unit value"), g=Argument("BTHV", "log decay"), beta=RATE,
    ),
    token=token,
    same_bits=True,
)  # fmt: skip
def gated_oja_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """The gated Oja rule: S ← S diag(e^g) (I − β v vᵀ) + β k vᵀ, o = scale · Sᵀ q: a delta rule that erases values.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk; values of unit length keep
            the state bounded.
        g: log-decay of each value channel ``[B, T, H, V]``, ≤ 0. beta: ``[B, T, H]``.
    """
    heads, S = v.shape[2], options.initial_state
    q, k = by_block(lambda *x: tuple(keys_of(heads, t) for t in x), q, k, layout=options.layout)
    o, M = _transposed(
        q, k, v, g, beta, scale=options.scale, initial_state=None if S is None else S.mT,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    return LinearAttentionOutput(o, None if M is None else M.mT)
