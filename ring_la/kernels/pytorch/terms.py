"""What one chunk of a linear recurrence contributes, as an affine system in the state that enters it:

    S' = A S + b,        o = Q S + p.

Everything here depends on the chunk's own tokens alone, for all chunks at once; heads and chunks are leading
dimensions, ``x [..., C, D]``. `scores` never takes the exponential of a positive number, however strong the decay.

Sources: additive rules, Yang et al., "Gated linear attention" (arXiv 2312.06635), §4, and Dao & Gu, "Transformers are
SSMs" (arXiv 2405.21060), §6; delta rules in WY form, Yang et al., "Parallelizing linear transformers with the delta
rule" (arXiv 2406.06484), §3 and "Gated delta networks" (arXiv 2412.06464), §3.3; general low rank, Peng et al.,
"RWKV-7" (arXiv 2503.14456), App. H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...algebra import Rule
from ..protocol import Inputs

BLOCK = 16


class StateTerms(NamedTuple):
    """``S' = A S + b`` of each chunk, and what the output reuses: the low-rank writes ``w S + u`` of dense rules."""

    A: Tensor | None
    b: Tensor
    w: Tensor | None = None
    u: Tensor | None = None


def state_terms(rule: Rule, x: Inputs, decay: Decay) -> StateTerms:
    """The maps of all chunks of `x`, whose tensors are ``[..., C, D]`` (g and beta ``[..., C]``)."""
    if rule.write in ("additive", "sum"):
        return StateTerms(decay.total(), decay.to_end(x.k).mT @ x.v)
    if rule.write in ("delta", "erase"):
        beta = x.beta[..., None]
        reads = beta * (x.k if rule.write == "delta" else x.a)
        system = decay.scores(reads, x.k, strict=True)
        rhs = torch.cat([decay.from_start(reads), beta * x.v], -1)
        w, u = _solve_unit_lower(system, rhs).split([x.k.shape[-1], x.v.shape[-1]], -1)
        end = decay.to_end(x.k).mT
        return StateTerms(decay.dense(-(end @ w)), end @ u, w, u)
    system = -decay.scores(x.a, x.b, strict=True, before=True)
    rhs = torch.cat([decay.from_start(x.a, before=True), decay.scores(x.a, x.k, strict=True, before=True) @ x.v], -1)
    w, u = _solve_unit_lower(system, rhs).split([x.k.shape[-1], x.v.shape[-1]], -1)
    end = decay.to_end(x.b).mT
    return StateTerms(decay.dense(end @ w), end @ u + decay.to_end(x.k).mT @ x.v, w, u)


def output_terms(rule: Rule, x: Inputs, decay: Decay, scale: float, state: StateTerms) -> tuple[Tensor, Tensor]:
    """Q and p of ``o = Q S + p`` of all chunks."""
    q = x.q * scale
    Q, attn = decay.from_start(q), decay.scores(q, x.k)
    if rule.write in ("additive", "sum"):
        return Q, attn @ x.v
    if rule.write in ("delta", "erase"):
        return Q - attn @ state.w, attn @ state.u
    low_rank = decay.scores(q, x.b)
    return Q + low_rank @ state.w, low_rank @ state.u + attn @ x.v


def _solve_unit_lower(system: Tensor, rhs: Tensor) -> Tensor:
    """``(I + system)⁻¹ rhs`` for strictly lower triangular systems."""
    return torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)


class Decay:
    """Cumulative log-decays ``c_t = g_1 + … + g_t`` of chunks, and what they weigh.

    `before` takes the decay up to the token before, for readers of the state ahead of their own token's decay.
    """

    def __init__(self, rule: Rule, x: Inputs) -> None:
        self.kind, g = rule.decay, x.g
        self.C, self.like = x.k.shape[-2], x.k
        if self.kind == "none":
            return
        self.g = g[..., None] if self.kind == "scalar" else g  # [..., C, 1 or K]
        self.c = self.g.cumsum(-2)
        self.c_before = self.c - self.g

    def total(self) -> Tensor | None:
        """The transition of the whole chunk under an additive rule."""
        if self.kind == "none":
            return None
        total = self.c[..., -1, :].exp()
        return total[..., 0] if self.kind == "scalar" else total

    def dense(self, low_rank: Tensor) -> Tensor:
        """``diag(total) + low_rank``."""
        K = low_rank.shape[-1]
        if self.kind == "none":
            return low_rank + torch.eye(K, dtype=low_rank.dtype, device=low_rank.device)
        return low_rank + torch.diag_embed(self.c[..., -1, :].exp().expand(*low_rank.shape[:-2], K))

    def from_start(self, x: Tensor, before: bool = False) -> Tensor:
        """``x_t ⊙ exp(c_t)``: what reads the state that enters the chunk."""
        if self.kind == "none":
            return x
        return x * (self.c_before if before else self.c).exp()

    def to_end(self, x: Tensor) -> Tensor:
        """``x_t ⊙ exp(c_C − c_t)``: what is left of a write at the end of the chunk."""
        return x if self.kind == "none" else x * (self.c[..., -1:, :] - self.c).exp()

    def scores(self, x: Tensor, y: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        """``Σ_d x_id y_jd exp(c_i − c_j)_d`` for j ≤ i (j < i if strict), zero elsewhere: ``[..., C, C]``."""
        mask = torch.ones(self.C, self.C, dtype=torch.bool, device=x.device).tril(-1 if strict else 0)
        if self.kind == "none":
            return (x @ y.mT).masked_fill(~mask, 0)
        c = self.c_before if before else self.c
        if self.kind == "scalar":
            gap = c - self.c.mT  # [..., C, C]
            return (x @ y.mT) * gap.masked_fill(~mask, -torch.inf).exp()
        return self._blockwise(x, y, c, mask)

    def _blockwise(self, x: Tensor, y: Tensor, c: Tensor, mask: Tensor) -> Tensor:
        """Per-channel decays: blocks below the diagonal meet at a border between them (both factors ≤ 1), blocks on
        it are summed channel by channel."""
        rows = []
        for s in range(0, self.C, BLOCK):
            e = min(s + BLOCK, self.C)
            xi, ci = x[..., s:e, :], c[..., s:e, :]
            gap = ci[..., :, None, :] - self.c[..., None, s:e, :]
            gap = gap.masked_fill(~mask[s:e, s:e, None], -torch.inf)
            parts = [torch.einsum("...id,...jd,...ijd->...ij", xi, y[..., s:e, :], gap.exp())]
            if s:
                border = self.c[..., s - 1 : s, :]
                left = xi * (ci - border).exp()
                right = y[..., :s, :] * (border - self.c[..., :s, :]).exp()
                parts.insert(0, left @ right.mT)
            if e < self.C:
                parts.append(x.new_zeros(*x.shape[:-2], e - s, self.C - e))
            rows.append(torch.cat(parts, -1))
        return torch.cat(rows, -2)
