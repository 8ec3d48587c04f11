"""Any block in PyTorch: every dtype (fp64 too), every device, every mask and bias.

    p_ij = exp(s_ij − lse_i),  dv_j = Σ_i p_ij do_i,  ds_ij = p_ij (do_i·v_j − Δ_i) cap'(s_ij),
    dq_i = scale Σ_j ds_ij k_j,  dk_j = scale Σ_i ds_ij q_i                       (p dropped and rescaled by dropout)

One strip of rows at a time, so that no more than a strip of scores exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import Gradients, Partial, wide
from ..scores import Scores, dropout_keep
from ..tiles import Tile, strips, tiles
from ..tokens import Tokens
from .backend import Ask, Backend

ROWS = 512


class _Strip(NamedTuple):
    """Scores of one tile: q, k, v as ``[B, Hk, G·n or m, ·]``, s after the cap (−∞ where masked), cap' or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    slope_of_cap: Tensor | None
    keep: Tensor | None


class TorchBackend(Backend):
    """Scores strip by strip."""

    name = "torch"

    def refuses(self, ask: Ask) -> str:
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        for tile in tiles(scores, tq, tk):
            for strip in strips(tile, ROWS):
                out.add(*self.tile(q, k, v, scores, tq, tk, strip), strip.rows)

    def tile(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, t: Tile
    ) -> tuple[Tensor, Tensor]:
        """o ``[B, n, H, V]`` and lse ``[B, H, n]`` of one tile, wide."""
        x = _scores(q, k, v, scores, tq, tk, t)
        lse = torch.logsumexp(x.s, -1)
        p = torch.exp(x.s - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
        o = torch.matmul(_dropped(p, x.keep, scores), x.v)
        return _tokens_first(o, q.shape[2]), _heads(lse, q.shape[2])

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        groups, heads = k.shape[2], q.shape[2]
        for tile in tiles(scores, tq, tk):
            for t in strips(tile, ROWS):
                x = _scores(q, k, v, scores, tq, tk, t)
                row_lse, row_delta = (_grouped(y[:, :, t.rows], groups)[..., None] for y in (lse, delta))
                p = torch.exp(x.s - torch.where(torch.isneginf(row_lse), 0.0, row_lse))
                g = _heads_first(do[:, t.rows], groups)
                dv = torch.matmul(_dropped(p, x.keep, scores).mT, g)
                ds = p.mul_(_dropped(torch.matmul(g, x.v.mT), x.keep, scores).sub_(row_delta))
                if x.slope_of_cap is not None:
                    ds = ds.mul_(x.slope_of_cap)
                dq = torch.matmul(ds, x.k).mul_(scores.scale)
                dk = torch.matmul(ds.mT, x.q).mul_(scores.scale)
                out.add(_tokens_first(dq, heads), dk.transpose(1, 2), dv.transpose(1, 2), t.rows, t.keys)


def _scores(q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, t: Tile) -> _Strip:
    groups = k.shape[2]
    q_ = _heads_first(q[:, t.rows], groups)
    k_, v_ = (x[:, t.keys].transpose(1, 2).to(wide(q.dtype)) for x in (k, v))
    s = torch.matmul(q_, k_.mT).mul_(scores.scale)
    slope_of_cap = None
    if scores.softcap:
        bent = torch.tanh(s / scores.softcap)
        s, slope_of_cap = bent * scores.softcap, 1 - bent * bent
    B, Hk, rows, m = s.shape
    by_head = s.view(B, Hk, rows // (t.q1 - t.q0), t.q1 - t.q0, m)  # [B, Hk, G, n, m]
    if scores.alibi_slopes is not None or not t.full:
        distance = tk.positions[None, t.keys] - tq.positions[t.rows, None]
        if scores.alibi_slopes is not None:
            slopes = scores.alibi_slopes.to(s.dtype).reshape(-1, Hk, by_head.shape[2], 1, 1)
            by_head.sub_(slopes * distance.abs())
        if not t.full:
            seen = scores.visible(distance, tq.documents[t.rows], tk.documents[t.keys])
            by_head.masked_fill_(~seen, -torch.inf)
    keep = None
    if scores.dropout_p:
        keep = dropout_keep(scores, B, q.shape[2], tq.index[t.rows], tk.index[t.keys]).reshape(s.shape)
    return _Strip(q_, k_, v_, s, slope_of_cap, keep)


def _dropped(p: Tensor, keep: Tensor | None, scores: Scores) -> Tensor:
    return p if keep is None else p * keep / (1 - scores.dropout_p)


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """``[B, n, H, D] → [B, Hk, G·n, D]``, wide: the query heads of a key head side by side."""
    B, n, H, D = x.shape
    return x.transpose(1, 2).to(wide(x.dtype)).reshape(B, groups, H // groups * n, D)


def _tokens_first(x: Tensor, heads: int) -> Tensor:
    """``[B, Hk, G·n, D] → [B, n, H, D]``."""
    B, groups, rows, D = x.shape
    return x.reshape(B, heads, rows * groups // heads, D).transpose(1, 2)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[B, H, n] → [B, Hk, G·n]``."""
    B, H, n = x.shape
    return x.reshape(B, groups, H // groups * n)


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[B, Hk, G·n] → [B, H, n]``."""
    return x.reshape(x.shape[0], heads, -1)
