"""Dense softmax attention: every score is formed, masked in plain sight, and normalised.

    s_ij = cap(scale · q_iᵀ k_j) − slope · |p_i − p_j|,       cap(s) = softcap · tanh(s / softcap)
    o_i  = Σ_j exp(s_ij − lse_i) v_j,                         lse_i = log(Σ_j exp s_ij + exp sink)

over the keys j that i sees: those of its own document, not after it if causal, and inside its window. Positions p count
from the start of a document. Queries fewer or more than the keys are aligned with them at the end, as in
FlashAttention: p_i = i + Tk − Tq.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ring_la.choices import JointPlace
from ring_la.errors import ArgumentError, UnsupportedError
from ring_la.outputs import AttentionOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    joint_k: Tensor | None = None,
    joint_v: Tensor | None = None,
    joint: JointPlace = "none",
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Literal["reference"] | None = None,
) -> AttentionOutput:
    """Softmax attention (Vaswani et al. 2017, eq. 1), with the masks and biases of today's models.

    q [B, Tq, H, K]; k [B, Tk, Hk, K]; v [B, Tk, Hk, V], H a multiple of Hk (query head h reads head h // (H // Hk)).
    scale         None means K**-0.5
    softcap       c > 0 caps scores at ±c; 0: none
    window        (left, right) keys a query sees on either side of its own position; −1: unbounded
    alibi_slopes  [H] or [B, H]
    sinks         [H], a logit more in each head's denominator, with no value (gpt-oss)
    joint_k/v     [B, Tj, Hk, ·], keys put before ("front") or after ("rear") those of each document, at the positions
                  −Tj … −1 or Tk … Tk + Tj − 1 of that document; "rear" is refused when causal, as no query would see it
    cu_seqlens    [N + 1] offsets of documents packed into one batch row (q and k of one length)

    Returns `AttentionOutput(o [B, Tq, H, V], lse [B, H, Tq])`, both float64; lse counts the sink. A query that sees no
    key has o = 0 and lse = −∞ (or the sink). Bad arguments raise `ArgumentError`; `dropout_p` other than 0 is refused.
    """
    expect_local(layout, backend)
    _expect_arguments(q, k, v, softcap, window, dropout_p, cu_seqlens)
    _expect_joint(k, v, joint, joint_k, joint_v, causal)
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    left, right = window[0], 0 if causal else window[1]

    outputs = []
    for _, rows, tokens in documents(q.shape[0], k.shape[1], cu_seqlens):
        of_q = slice(None) if cu_seqlens is None else tokens
        q_, k_, v_ = q[rows, of_q], k[rows, tokens], v[rows, tokens]
        Tq, Tk, first = q_.shape[1], k_.shape[1], 0
        if joint == "front" and joint_k is not None and joint_v is not None:
            k_, v_, first = torch.cat([joint_k, k_], 1), torch.cat([joint_v, v_], 1), -joint_k.shape[1]
        if joint == "rear" and joint_k is not None and joint_v is not None:
            k_, v_ = torch.cat([k_, joint_k], 1), torch.cat([v_, joint_v], 1)
        distance = torch.arange(k_.shape[1]) + first - (torch.arange(Tq)[:, None] + Tk - Tq)
        distance = distance.to(q.device)
        scores = _scores(q_, k_, factor, softcap, alibi_slopes, distance)
        unseen = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
        outputs.append(_softmax(scores.masked_fill(unseen, -torch.inf), v_, sinks))
    return AttentionOutput(torch.cat([part.o for part in outputs], 1), torch.cat([part.lse for part in outputs], 2))


def _scores(
    q: Tensor, k: Tensor, scale: float, softcap: float, alibi_slopes: Tensor | None, distance: Tensor
) -> Tensor:
    """The biased scores [B, H, Tq, Tk], before any mask."""
    B, _, H, _ = q.shape
    k = k.double().repeat_interleave(H // k.shape[2], dim=2)
    scores = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None].expand(B, *alibi_slopes.shape)
        expect_shape("alibi_slopes", slopes, B=B, H=H)
        scores = scores - slopes.double()[:, :, None, None] * distance.abs()
    return scores


def _softmax(scores: Tensor, v: Tensor, sinks: Tensor | None) -> AttentionOutput:
    """Normalise `scores` [B, H, Tq, Tk], −∞ where unseen, and average `v` [B, Tk, Hk, V]."""
    B, H, Tq, _ = scores.shape
    logits = scores
    if sinks is not None:
        expect_shape("sinks", sinks, H=H)
        logits = torch.cat([scores, sinks.double()[None, :, None, None].expand(B, H, Tq, 1)], dim=-1)
    blind = torch.isneginf(logits).all(-1)
    lse = torch.logsumexp(logits.masked_fill(blind[..., None], 0.0), dim=-1)
    weights = torch.exp(scores - lse[..., None])
    o = torch.einsum("bhij,bjhd->bihd", weights, v.double().repeat_interleave(H // v.shape[2], dim=2))
    return AttentionOutput(o, lse.masked_fill(blind, -torch.inf))


def _expect_arguments(
    q: Tensor, k: Tensor, v: Tensor, softcap: float, window: tuple[int, int], dropout_p: float, cu_seqlens: object
) -> None:
    """Check the shapes of q, k, v and the plain numbers."""
    expect_shape("q", q, B=None, Tq=None, H=None, K=None)
    B, Tq, H, K = q.shape
    expect_shape("k", k, B=B, Tk=None, Hk=None, K=K)
    Tk, Hk = k.shape[1:3]
    expect_shape("v", v, B=B, Tk=Tk, Hk=Hk, V=None)
    if H % Hk:
        raise ArgumentError("q", f"a number of heads that is a multiple of the {Hk} of k", H)
    if cu_seqlens is not None and Tq != Tk:
        raise ArgumentError("cu_seqlens", "None where q and k differ in length", f"lengths {Tq} and {Tk}")
    if len(window) != 2 or min(window) < -1:
        raise ArgumentError("window", "(left, right), each −1 or more", window)
    if softcap < 0:
        raise ArgumentError("softcap", "0 or more", softcap)
    if dropout_p:
        raise UnsupportedError("dropout_p", "0", dropout_p, "The reference is deterministic")


def _expect_joint(
    k: Tensor, v: Tensor, joint: str, joint_k: Tensor | None, joint_v: Tensor | None, causal: bool
) -> None:
    """Check the joint keys and values."""
    given = joint_k is not None, joint_v is not None
    if joint == "none" and given == (False, False):
        return
    if joint not in ("front", "rear") or given != (True, True):
        expected = "'front' or 'rear' with joint_k and joint_v, or 'none' without"
        raise ArgumentError("joint", expected, f"{joint!r}, joint_k given: {given[0]}, joint_v given: {given[1]}")
    if joint == "rear" and causal:
        raise UnsupportedError("joint", "'front' where causal", "'rear'", "No query sees keys after its own position")
    assert joint_k is not None
    assert joint_v is not None
    expect_shape("joint_k", joint_k, B=k.shape[0], Tj=None, Hk=k.shape[2], K=k.shape[3])
    expect_shape("joint_v", joint_v, B=k.shape[0], Tj=joint_k.shape[1], Hk=k.shape[2], V=v.shape[3])
