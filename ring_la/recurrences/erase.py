"""Delta rules that erase along one key and write along another: Comba and GDN-2.

    S ← D S + k (u − (D S)ᵀ e)ᵀ = (D − k (D e)ᵀ) S + k uᵀ,       D = diag(exp g)

is the rule "dplr" with b = k and a = −D e: it reads the state before the decay, so that the decay goes into `a`.
"""

from __future__ import annotations

from torch import Tensor

from ..blockwise import by_block
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import CHANNEL_DECAY, DECAY, KEY, QUERY, RATE, VALUE, Argument
from .definition import CommonOptions
from .dplr import dplr_delta_rule
from .recurrence import recurrence


def erase_and_write(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor, e: Tensor, options: CommonOptions
) -> LinearAttentionOutput:
    """S ← D S + k (u − (D S)ᵀ e)ᵀ. q, k ``[B,T,Hk,K]``, u ``[B,T,H,V]``, g ``[B,T,H]`` or with K, e ``[B,T,H,K]``."""
    a, b, g = by_block(_low_rank, k, g, e, layout=options.layout)
    return dplr_delta_rule(
        q, k, u.to(q.dtype), a, b, g, scale=options.scale, initial_state=options.initial_state,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip


def _low_rank(k: Tensor, g: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and g of the rule."""
    wide = g if g.dim() == 4 else g[..., None].expand(*g.shape, k.shape[-1])
    a = -(wide.exp() * e).to(k.dtype)
    return a, keys_of(e.shape[2], k), wide


def keys_of(heads: int, k: Tensor) -> Tensor:
    """Keys ``[B, T, Hk, K]`` of so many value heads."""
    return k if k.shape[2] == heads else k.repeat_interleave(heads // k.shape[2], 2)


def comba_token(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of Comba."""
    S = g.exp()[..., None, None] * S
    S = S + outer(beta[..., None] * k, v - read(S, p))
    return S, read(S, q)


@recurrence(
    paper="Hu et al. 2025, arXiv 2506.02475, eq. 7",
    equation="S ← e^g (I − β k pᵀ) S + β k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY, beta=RATE, p=Argument("BTHK", "unit")),
    token=comba_token,
    same_bits=True,
)
def comba(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, p: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """Comba, the delta rule with closed-loop control: S ← e^g (I − β k pᵀ) S + β k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm, which leaves p as it is).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``.
        p: what is erased, ``[B, T, H, K]`` (or Hk heads); in the paper ``p = b k``, b a learned number a head.
    """
    written, erased = by_block(_at_rate, beta, v, p, layout=options.layout)
    return erase_and_write(q, k, written, g, erased, options)


def _at_rate(rate: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return rate[..., None] * v, rate[..., None] * p


def gdn2_token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One token of GDN-2."""
    S = g.exp()[..., None] * S
    S = S + outer(k, w * v - read(S, b * k))
    return S, read(S, q)


@recurrence(
    paper="GDN-2, as in fla-core 0.6.0's ops/gdn2",
    equation="S ← (I − k (b ⊙ k)ᵀ) diag(e^g) S + k (w ⊙ v)ᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=CHANNEL_DECAY, b=Argument("BTHK", "rate"), w=Argument("BTHV", "rate")),
    token=gdn2_token,
    same_bits=True,
)
def gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """Gated DeltaNet 2, with gates of each channel for erasing and writing: S ← (I − k (b⊙k)ᵀ) diag(e^g) S + k (w⊙v)ᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay of each key channel ``[B, T, H, K]``, ≤ 0.
        b: erase gate of each key channel ``[B, T, H, K]``, in [0, 1]. w: write gate of each value ``[B, T, H, V]``.
    """
    erased = by_block(lambda b, k: b * keys_of(b.shape[2], k), b, k, layout=options.layout)
    return erase_and_write(q, k, w * v, g, erased, options)
