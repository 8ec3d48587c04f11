"""The gated delta product: n delta steps a token.

A token's steps stand one after the other in a sequence n times as long, whose layout has the same borders n-fold: the
decay is the first step's, the query the last one's.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..layout import Segment
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import DECAY, QUERY, Argument
from .definition import CommonOptions
from .delta import gated_delta_rule
from .recurrence import recurrence


def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: decay, n delta steps, and the read."""
    S = g.exp()[..., None, None] * S
    for i in range(k.shape[1]):
        key = k[:, i]
        S = S + outer(beta[:, i, :, None] * key, v[:, i] - read(S, key))
    return S, read(S, q)


@recurrence(
    paper="Siems et al. 2025, arXiv 2502.10297, eq. 5 and 7",
    equation="S ← e^g S, then n times S ← (I − β k kᵀ) S + β k vᵀ",
    arguments=dict(
        q=QUERY,
        k=Argument("BTNGK", "key"),
        v=Argument("BTNHV", "value"),
        g=DECAY,
        beta=Argument("BTNH", "rate"),
    ),
    token=token,
    sizes=dict(N=2),
    same_bits=True,
)
def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """The gated delta product: a decay, then n delta steps a token: S ← e^g S, n times S ← (I − β k kᵀ) S + β k vᵀ.

    Args:
        q: ``[B, T, Hk, K]``. k: ``[B, T, n, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, n, H, V]`` with H a multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, n, H]``.
    """
    n, heads = k.shape[2], v.shape[3]
    q_last = torch.cat([q.new_zeros(*q.shape[:2], n - 1, *q.shape[2:]), q[:, :, None]], 2).flatten(1, 2)
    g_first = torch.cat([g[:, :, None], g.new_zeros(*g.shape[:2], n - 1, heads)], 2).flatten(1, 2)
    o, S = gated_delta_rule(
        q_last, k.flatten(1, 2), v.flatten(1, 2), g_first, beta.flatten(1, 2), scale=options.scale,
        initial_state=options.initial_state, output_final_state=options.output_final_state,
        mode=options.mode, backend=options.backend, **steps(options, n),
    )  # fmt: skip
    return LinearAttentionOutput(o[:, n - 1 :: n], S)


def steps(options: CommonOptions, n: int) -> dict[str, object]:
    """How the steps of all tokens are split, or packed."""
    cu, layout = options.cu_seqlens, options.layout
    if n == 1:
        return options.inner
    if layout is None:
        return {"layout": None, "cu_seqlens": None if cu is None else cu * n}
    return {"layout": layout.kept(StepsLayout, lambda: StepsLayout(layout, n), n), "cu_seqlens": None}


class StepsLayout(ShardedLayout):
    """The split of n steps for each token: on the ranks of the tokens, whatever that split goes by."""

    def __init__(self, tokens: ShardedLayout, n: int) -> None:
        self.of_tokens, self.n = tokens, n
        cu = [n * c for c in tokens.cu_seqlens] if tokens.packed else None
        super().__init__(tokens.cp, n * tokens.seq_len, tokens.kind, cu, n * tokens.multiple_of)

    @property
    def split(self) -> tuple:
        return (*super().split, self.n)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(self.n * s.start, self.n * s.stop, s.owner) for s in self.of_tokens.segments)
