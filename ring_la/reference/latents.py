"""Multi-head latent attention, dense: one head at a time, its keys and values written out, every score formed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_la.errors import UnsupportedError
from ring_la.outputs import MLAOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape
from ring_la.reference.sparse import sparse_attention


def mla(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
    backend: str | None = None,
) -> MLAOutput:
    """Attention to k_jh = [W_uk,h c_j ; r_j] and v_jh = W_uv,h c_j (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).

    q [B, Tq, H, N + R]; latent c [B, Tk, L]; k_rope r [B, Tk, R]; w_uk [H, N, L]; w_uv [H, V, L]; chosen
    and block as `sparse_attention`, the rest as `attention`. Returns `MLAOutput(o [B, Tq, H, V], lse [B, H, Tq], None)`
    in float64.
    """
    expect_local(layout, backend)
    _expect_arguments(q, latent, k_rope, w_uk, w_uv, dropout_p)
    B, _, H, K = q.shape
    if chosen is not None:
        keys, values = _expanded(latent, k_rope, w_uk, w_uv)
        how: dict[str, Any] = dict(causal=causal, scale=scale, window=window, sinks=sinks, cu_seqlens=cu_seqlens)
        return MLAOutput(*sparse_attention(q, keys, values, chosen, block=block, **how), None)
    factor = float(K**-0.5) if scale is None else scale
    limits = window[0], 0 if causal else window[1]
    outs, sums = [], []
    for _, rows, tokens in documents(B, latent.shape[1], cu_seqlens):
        of_q, heads = slice(None) if cu_seqlens is None else tokens, []
        c, r = latent[rows, tokens].double(), k_rope[rows, tokens].double()
        for h in range(H):
            s = _scores(factor, q[rows, of_q, h].double(), torch.cat([c @ w_uk[h].double().T, r], -1), softcap)
            sink = None if sinks is None else sinks[h].double()
            heads.append(_one_head(s, c @ w_uv[h].double().T, limits, sink))
        outs.append(torch.stack([o for o, _ in heads], 2))
        sums.append(torch.stack([lse for _, lse in heads], 1))
    return MLAOutput(torch.cat(outs, 1), torch.cat(sums, 2), None)


def _scores(factor: float, q: Tensor, k: Tensor, softcap: float) -> Tensor:
    s = factor * (q @ k.transpose(1, 2))
    return softcap * torch.tanh(s / softcap) if softcap else s


def _expect_arguments(q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, dropout_p: float) -> None:
    if dropout_p:
        raise UnsupportedError("dropout_p", "0", dropout_p, "The reference is deterministic")
    expect_shape("q", q, B=None, Tq=None, H=None, K=None)
    (B, _, H, K), R = q.shape, k_rope.shape[-1]
    expect_shape("latent", latent, B=B, Tk=None, L=None)
    expect_shape("k_rope", k_rope, B=B, Tk=latent.shape[1], R=None)
    expect_shape("w_uk", w_uk, H=H, N=K - R, L=latent.shape[2])
    expect_shape("w_uv", w_uv, H=H, V=None, L=latent.shape[2])


def _expanded(latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, [B, Tk, H, ·]."""
    keys = torch.einsum("btl,hnl->bthn", latent.double(), w_uk.double())
    keys = torch.cat([keys, k_rope.double()[:, :, None].expand(-1, -1, len(w_uk), -1)], -1)
    return keys, torch.einsum("btl,hvl->bthv", latent.double(), w_uv.double())


def _one_head(s: Tensor, v: Tensor, limits: tuple[int, int], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse of scores [B, Tq, Tk], the last query standing at the last key."""
    Tq, Tk = s.shape[1:]
    ahead = torch.arange(Tk) - (torch.arange(Tq)[:, None] + Tk - Tq)  # how far a key stands after a query
    seen = torch.ones(Tq, Tk, dtype=torch.bool)
    if limits[0] >= 0:
        seen &= ahead >= -limits[0]
    if limits[1] >= 0:
        seen &= ahead <= limits[1]
    weights = torch.where(seen.to(s.device), s, -torch.inf)
    if sink is not None:
        weights = torch.cat([weights, sink.expand(*s.shape[:2], 1)], -1)
    blind = torch.isneginf(weights).all(-1)
    lse = torch.logsumexp(torch.where(blind[..., None], 0.0, weights), -1)
    p = torch.exp(weights - lse[..., None])[..., :Tk]
    return p @ v, torch.where(blind, -torch.inf, lse)
