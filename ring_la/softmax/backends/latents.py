"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a key and its value come as one latent for all heads.

    k_jh = [W_uk,h c_j ; r_j],   v_jh = W_uv,h c_j          c_j the latent [L], r_j the rotary part that heads share [R]

What strategies move are latents and rotary parts, in the places of keys and values; these kernels stand between them
and one that knows neither. Two ways to the same numbers:

    expanded   keys and values are made of each block that arrives, and made again in the backward pass
    absorbed   queries are taken to the latents, q'_ih = W_uk,hᵀ q_ih: every head reads one key [c_j ; r_j] and one
               value c_j, and what comes out, o'_ih = Σ_j p_ij c_j, becomes o_ih = W_uv,h o'_ih

With n queries a key, expanding costs  L (N + V)  more and each score  2 L − N − V  less, in products of a head: so few
queries are absorbed, and many meet expanded keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...choices import LatentForm
from ..geometry import Pair
from ..geometry.stretches import stretches_of_keys
from ..merging import Gradients, Partial, Sum, wide
from ..scores import Scores
from .backend import AttentionBackend, QueryRows
from .chosen import ChosenBackend

LEAST_KEYS = 4096
"""Keys that are expanded at once, if they are not more than the queries."""
AT_ONCE = 65536
"""Queries that have chosen their keys and are absorbed at once: each is L + R numbers a head then, several times."""
TOKENS = 8192
"""Queries whose o' are wide at once."""


def cheaper_form(queries: int, up_k: Tensor, up_v: Tensor) -> LatentForm:
    """The way with fewer products for so many queries a key."""
    (_, N, L), V = up_k.shape, up_v.shape[1]
    return "absorbed" if queries * (2 * L - N - V) < L * (N + V) else "expanded"


class LatentBackend(AttentionBackend):
    """A kernel on latents; it also sums up the gradients of what makes keys and values of them.

    Args:
        inner: what computes on keys and values. up_k, up_v: ``[H, N, L]`` and ``[H, V, L]``.

    Attributes:
        dup_k, dup_v: the sums.
    """

    def __init__(self, inner: AttentionBackend, up_k: Tensor, up_v: Tensor) -> None:
        self.inner, self.up_k, self.up_v = inner, up_k, up_v
        self.name, self.knows = inner.name, inner.knows
        self.takes_delta, self.sums_wide, self.fixed_keys = inner.takes_delta, inner.sums_wide, inner.fixed_keys
        self.dup_k, self.dup_v = (torch.zeros_like(w, dtype=wide(w.dtype)) for w in (up_k, up_v))

    def up_gradients(self) -> tuple[Tensor, Tensor]:
        """The sums so far, in the dtype of what makes keys and values."""
        return self.dup_k.to(self.up_k.dtype), self.dup_v.to(self.up_v.dtype)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of keys come in."""
        return wide(dtype) if self.sums_wide else dtype


class Expanded(LatentBackend):
    """Keys and values made of latents, no more at once than there are queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        for keys, met in self._stretches(pair):
            self.inner.forward(q, *self._expand(k[:, keys, 0], v[:, keys, 0]), scores, met, out)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        for keys, met in self._stretches(pair):
            latent, rotary = k[:, keys, 0], v[:, keys, 0]
            made = self._expand(latent, rotary)
            grads = Gradients(out.dq, *map(Sum.like, made))
            self.inner.backward(x, *made, scores, met, grads)
            del made
            dtype = self._dtype(latent.dtype)
            dlatent, drotary = self._fold(grads.dk.result(dtype), grads.dv.result(dtype), latent)
            out.dk.add(dlatent, keys)
            out.dv.add(drotary, keys)

    def _stretches(self, pair: Pair) -> list[tuple[slice, Pair]]:
        if self.inner.fixed_keys:
            return [(slice(0, len(pair.keys)), pair)]
        return stretches_of_keys(pair, max(LEAST_KEYS, len(pair.rows)))

    def _expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, n, H, N + R]`` and values ``[B, n, H, V]`` of ``latent [B, n, L]`` and ``rotary [B, n, R]``."""
        (H, N, _), (B, n, R) = self.up_k.shape, rotary.shape
        k = latent.new_empty(B, n, H, N + R)
        k[..., :N] = (latent @ self.up_k.flatten(0, 1).mT).unflatten(-1, (H, N))
        k[..., N:] = rotary[:, :, None]
        return k, (latent @ self.up_v.flatten(0, 1).mT).unflatten(-1, (H, -1))

    def _fold(self, dk: Tensor, dv: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of latents ``[B, n, 1, L]`` and rotary parts ``[B, n, 1, R]`` from those of keys and values."""
        N, dtype = self.up_k.shape[1], dk.dtype
        dkn, dv = dk[..., :N].flatten(2), dv.flatten(2)  # [B, n, H·N], [B, n, H·V]
        dlatent = dkn @ self.up_k.flatten(0, 1).to(dtype)
        dlatent += dv @ self.up_v.flatten(0, 1).to(dtype)
        flat = latent.reshape(-1, latent.shape[-1]).to(dtype)
        for total, grad in ((self.dup_k, dkn), (self.dup_v, dv)):
            total += (grad.flatten(0, 1).mT @ flat).view_as(total)
        return dlatent[:, :, None], dk[..., N:].sum(2, keepdim=True, dtype=wide(dtype)).to(dtype)


class Absorbed(LatentBackend):
    """Queries taken to the latents. Its inner kernel takes Δ, one key head, and K = L + R, V = L. Those that choose
    their keys are taken some at a time: `AT_ONCE`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        keys = self._keys(k, v)
        for rows, met, inner in self._strips(pair):
            part = self._part(inner, q[:, rows], keys, scores, met)
            if not part.empty:
                o, lse = part.result()
                out.add(self._raise(o), lse, rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        keys, strips = self._keys(k, v), self._strips(pair)
        for rows, met, inner in strips:
            self._backward(inner, x.cut(rows), keys, scores, met, out, rows)
            if len(strips) > 1:  # gradients of all keys, once for each strip: put together now
                out.dk.wide()
                out.dv.wide()

    def _strips(self, pair: Pair) -> list[tuple[slice, Pair, AttentionBackend]]:
        """Queries, where they stand against the keys, and the kernel for them."""
        n = len(pair.rows)
        if not isinstance(self.inner, ChosenBackend) or n <= AT_ONCE or pair.rows.runs is None:
            return [(slice(0, n), pair, self.inner)]
        rows = [slice(a, min(a + AT_ONCE, n)) for a in range(0, n, AT_ONCE)]
        chosen = self.inner.chosen
        return [
            (some, Pair(pair.rows.cut(some.start, some.stop), pair.keys, pair.reach), self.inner.of(chosen[:, some]))
            for some in rows
        ]

    def _backward(
        self,
        inner: AttentionBackend,
        x: QueryRows,
        keys: Tensor,
        scores: Scores,
        pair: Pair,
        out: Gradients,
        some: slice,
    ) -> None:
        """The gradients of some queries, ``keys [B, n, 1, L + R]``."""
        N, L = self.up_k.shape[1:]
        part = self._part(inner, x.q, keys, scores, pair)
        if part.empty:
            return
        o, lse = part.result()
        share = torch.exp(lse - torch.where(torch.isneginf(x.lse), torch.inf, x.lse))  # of these keys
        low = o.mul_(share.mT[..., None])  # it is ours, and large
        do = torch.einsum("bthv,hvl->bthl", x.do, self.up_v)
        delta = None if x.delta is None else x.delta + self._rounded_apart(x.do, do, low)
        rows, values = QueryRows(self._lower(x.q), low, do, x.lse, delta), keys[..., :L]
        grads = Gradients.of(rows.q, keys, values)
        inner.backward(rows, keys, values, scores, pair, grads)
        dtype = self._dtype(keys.dtype)
        dq, dk, dv = (g.result(dtype) for g in (grads.dq, grads.dk, grads.dv))
        dlow, q = dq[..., :L], x.q[..., :N]
        out.dq.add(torch.cat([torch.einsum("bthl,hnl->bthn", dlow, self.up_k.to(dtype)), dq[..., L:]], -1), some)
        out.dk.add(dk[..., :L] + dv)
        out.dv.add(dk[..., L:])
        self.dup_k += torch.einsum("bthn,bthl->hnl", q.to(dtype), dlow)
        self.dup_v += torch.einsum("bthv,bthl->hvl", x.do, low)

    def _rounded_apart(self, do: Tensor, low_do: Tensor, low: Tensor) -> Tensor:
        """``do'·o' − do·o`` of these keys ``[B, H, T]``: nothing but rounding. Δ comes from o and do, what it is taken
        from comes from o' and do': without this a query's gradients of scores would add up to the difference."""
        out = [
            _dots(low_do[:, a : a + TOKENS], x) - _dots(do[:, a : a + TOKENS], self._raise(x))
            for a, x in zip(range(0, low.shape[1], TOKENS), low.split(TOKENS, 1))
        ]
        return torch.cat(out, 1).transpose(1, 2)

    def _part(self, inner: AttentionBackend, q: Tensor, keys: Tensor, scores: Scores, pair: Pair) -> Partial:
        """o' and lse of these keys alone."""
        L = self.up_k.shape[2]
        part = Partial((*q.shape[:3], L), q.dtype, q.device)
        inner.forward(self._lower(q), keys, keys[..., :L], scores, pair, part)
        return part

    def _lower(self, q: Tensor) -> Tensor:
        """Queries as latents see them, ``[B, T, H, L + R]``."""
        N = self.up_k.shape[1]
        return torch.cat([torch.einsum("bthn,hnl->bthl", q[..., :N], self.up_k), q[..., N:]], -1)

    def _raise(self, o: Tensor) -> Tensor:
        """``[B, T, H, L] → [B, T, H, V]``."""
        return torch.einsum("bthl,hvl->bthv", o, self.up_v)

    @staticmethod
    def _keys(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k, v], -1)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """``x·y``, wide, ``[B, T, H]``."""
    return (x.to(wide(x.dtype)) * y).sum(-1)


FORMS: dict[str, type[LatentBackend]] = {"expanded": Expanded, "absorbed": Absorbed}
