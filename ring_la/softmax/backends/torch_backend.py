"""Any block in PyTorch: every dtype (fp64 too), every device, every mask and bias.

    p_ij = exp(s_ij − lse_i),  dv_j = Σ_i p_ij do_i,  ds_ij = p_ij (do_i·v_j − Δ_i) cap'(s_ij),
    dq_i = scale Σ_j ds_ij k_j,  dk_j = scale Σ_i ds_ij q_i                       (p dropped and rescaled by dropout)

One strip of rows at a time, so that no more than a strip of scores exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Pair, Tile, strips, tiles
from ..merging import Gradients, Partial, wide
from ..scores import Scores, dropout_keep
from ..sums import keep_first
from .backend import AttentionBackend, QueryRows

ROWS = 512


class _Strip(NamedTuple):
    """Scores of one tile: q, k, v as ``[B, Hk, G·n or m, ·]``, s after the cap (−∞ where masked), cap' or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    slope_of_cap: Tensor | None
    keep: Tensor | None


class TorchBackend(AttentionBackend):
    """Scores strip by strip."""

    name = "torch"
    knows = frozenset({"scale", "softcap", "alibi_slopes", "dropout_p", "sums"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        for tile in tiles(pair):
            for strip in strips(tile, ROWS):
                out.add(*self.tile(q, k, v, scores, pair, strip), strip.rows)

    def tile(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, t: Tile) -> tuple[Tensor, Tensor]:
        """o ``[B, n, H, V]`` and lse ``[B, H, n]`` of one tile, wide."""
        x = _strip(q, k, v, scores, pair, t)
        lse = torch.logsumexp(x.s, -1)
        p = torch.exp(x.s - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
        o = torch.matmul(_dropped(p, x.keep, scores), x.v)
        return _tokens_first(o, q.shape[2]), _heads(lse, q.shape[2])

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        for tile in tiles(pair):
            for strip in strips(tile, ROWS):
                out.add(*tile_gradients(x, k, v, scores, pair, strip), strip.rows, strip.keys)


def tile_gradients(
    x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, t: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of one strip, wide."""
    groups, y = k.shape[2], _strip(x.q, k, v, scores, pair, t)
    lse, delta = (_grouped(z[:, :, t.rows], groups)[..., None] for z in (x.lse, x.delta))
    p = torch.exp(y.s - torch.where(torch.isneginf(lse), 0.0, lse))
    g = _heads_first(x.do[:, t.rows], groups)
    dv = torch.matmul(_dropped(p, y.keep, scores).mT, g)
    ds = p.mul_(_dropped(torch.matmul(g, y.v.mT), y.keep, scores).sub_(delta))
    if y.slope_of_cap is not None:
        ds = ds.mul_(y.slope_of_cap)
    dq = torch.matmul(ds, y.k).mul_(scores.scale)
    dk = torch.matmul(ds.mT, y.q).mul_(scores.scale)
    if scores.sums:
        keep_first(dq, dk, scores.sums, x.q.dtype)
    return _tokens_first(dq, x.q.shape[2]), dk.transpose(1, 2), dv.transpose(1, 2)


def _strip(q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, t: Tile) -> _Strip:
    groups = k.shape[2]
    q_ = _heads_first(q[:, t.rows], groups)
    k_, v_ = (x[:, t.keys].transpose(1, 2).to(wide(q.dtype)) for x in (k, v))
    s = torch.matmul(q_, k_.mT).mul_(scores.scale)
    slope_of_cap = None
    if scores.softcap:
        bent = torch.tanh(s / scores.softcap)
        s, slope_of_cap = bent * scores.softcap, 1 - bent * bent
    _mask(s, scores, pair, t)
    keep = None
    if scores.dropout_p:
        rows, keys = pair.rows.index[t.rows], pair.keys.index[t.keys]
        keep = dropout_keep(scores, len(q), q.shape[2], rows, keys).reshape(s.shape)
    return _Strip(q_, k_, v_, s, slope_of_cap, keep)


def _mask(s: Tensor, scores: Scores, pair: Pair, t: Tile) -> None:
    """Biases, and −∞ where a key is not seen, into scores ``[B, Hk, G·n, m]``."""
    if scores.alibi_slopes is None and t.full:
        return
    (B, Hk, rows, m), n, tq, tk = s.shape, t.q1 - t.q0, pair.rows, pair.keys
    by_head = s.view(B, Hk, rows // n, n, m)  # [B, Hk, G, n, m]
    distance = tk.positions[None, t.keys] - tq.positions[t.rows, None]
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.to(s.dtype).reshape(-1, Hk, by_head.shape[2], 1, 1)
        by_head.sub_(slopes * distance.abs())
    if not t.full:
        seen = pair.reach.visible(distance, tq.documents[t.rows], tk.documents[t.keys])
        by_head.masked_fill_(~seen, -torch.inf)


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
