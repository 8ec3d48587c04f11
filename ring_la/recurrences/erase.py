"""Delta rules that erase along one key and write along another: Comba and GDN-2.

    S ← D S + β k (v − (D S)ᵀ e)ᵀ = (I − β k eᵀ) D S + β k vᵀ,       D = diag(exp g)

is the rule "erase" (with b = β k and a = −D e it were "dplr", whose kernels have a second stream of writes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra import Rule
from ..blockwise import by_block, by_element, repeated
from ..kernels import Inputs
from ..kernels.fused.ahead import ahead_of_decay
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import CHANNEL_DECAY, DECAY, KEY, QUERY, RATE, VALUE, Argument
from .definition import CommonOptions, Recurrence
from .recurrence import recurrence


@recurrence(paper="a delta rule with a key of its own for erasing")
def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, e: Tensor) -> Recurrence:
    """`erase_and_write`, a decay a head."""
    return Recurrence(Rule("erase", "scalar"), Inputs(q, k, v, g, beta, e), names={"a": "e"})


@recurrence(paper="a delta rule with a key of its own for erasing")
def _by_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, e: Tensor) -> Recurrence:
    """`erase_and_write`, a decay a key channel."""
    return Recurrence(Rule("erase", "diagonal"), Inputs(q, k, v, g, beta, e), names={"a": "e"})


def erase_and_write(inputs: Inputs, options: CommonOptions) -> LinearAttentionOutput:
    """S ← D S + β k (v − (D S)ᵀ a)ᵀ. q, k ``[B,T,Hk,K]``, v ``[B,T,H,V]``, g ``[B,T,H]`` or with K, beta ``[B,T,H]``, a
    ``[B,T,H,K]``."""
    q, k, v, g, beta, a, _ = inputs
    assert g is not None
    return (_by_head if g.dim() == 3 else _by_channel)(
        q, k, v, g, beta, a, scale=options.scale, initial_state=options.initial_state,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip


def keys_of(heads: int, k: Tensor) -> Tensor:
    """Keys ``[B, T, Hk, K]`` of so many value heads."""
    return repeated(k, heads // k.shape[2])


def least_decay(dtype: torch.dtype) -> float:
    """The log-decay g down to which e^−g times numbers of about 1 stays in range; e^g is below rounding there."""
    return -8.0 if dtype == torch.float16 else -60.0


def comba_token(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of Comba."""
    held = read(S, p)
    S = g.exp()[..., None, None] * S + outer(beta[..., None] * k, v - held)
    return S, read(S, q)


@recurrence(
    paper="Hu et al. 2025, arXiv 2506.02475, as in fla-core's kernels",
    equation="S ← (e^g I − β k pᵀ) S + β k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY, beta=RATE, p=Argument("BTHK", "unit")),
    token=comba_token,
    same_bits=True,
)
def comba(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, p: Tensor, *, options: CommonOptions
) -> LinearAttentionOutput:
    """Comba, the delta rule with closed-loop control: S ← (e^g I − β k pᵀ) S + β k vᵀ.

    What is erased is what the state held along p before its decay, as in fla-core's kernels, chunked and recurrent (its
    `naive_recurrent_comba` takes the state behind its decay). By the rule "erase" that is p e^−g; a decay counts down
    to `least_decay`, which leaves of a state less than its rounding.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm, which leaves p as it is).
        v: ``[B, T, H, V]`` with H a multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``.
        p: what is erased, ``[B, T, H, K]``; in the paper ``p = b k``, b a learned number a head.
    """

    @by_element
    def ahead(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return ahead_of_decay(p, g, least_decay(p.dtype))

    erased, g = by_block(ahead, p, g, layout=options.layout)
    return erase_and_write(Inputs(q, k, v, g, beta, erased), options)


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

    @by_element
    def gated(b: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (b * keys_of(b.shape[2], k)).to(k.dtype), (w * v).to(v.dtype)

    erased, written = by_block(gated, b, k, v, w, layout=options.layout)
    return erase_and_write(Inputs(q, k, written, g, g.new_ones(v.shape[:3]), erased), options)
