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
from ..products import product
from ..scores import Scores
from .backend import AttentionBackend, QueryRows
from .chosen import ChosenBackend

NUMBERS = 1 << 27
"""Numbers of keys, but for rotary parts, and values that are expanded at once, if these are not more keys than queries:
0.27 GB in 16 bits, and as much of gradients. Of 16 heads of DeepSeek's widths 32,768 keys, so that one kernel takes two
owners' at 16,384 tokens a rank."""
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
            parts = (grad.stretches(self._dtype(latent.dtype)) for grad in (grads.dk, grads.dv))
            for (a, b, dk), (c, d, dv) in zip(*parts):
                assert (a, b) == (c, d)  # kernels add to both
                dlatent, drotary = self._fold(dk, dv, latent[:, a:b])
                out.dk.add(dlatent, slice(keys.start + a, keys.start + b))
                out.dv.add(drotary, slice(keys.start + a, keys.start + b))

    def _stretches(self, pair: Pair) -> list[tuple[slice, Pair]]:
        if self.inner.fixed_keys:
            return [(slice(0, len(pair.keys)), pair)]
        each = self.up_k.shape[0] * (self.up_k.shape[1] + self.up_v.shape[1])
        return stretches_of_keys(pair, max(NUMBERS // each, len(pair.rows)))

    def _expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, n, H, N + R]`` and values ``[B, n, H, V]`` of ``latent [B, n, L]`` and ``rotary [B, n, R]``."""
        (H, N, L), (B, n, R) = self.up_k.shape, rotary.shape
        k = latent.new_empty(B, n, H, N + R)
        for x, into in zip(latent, k):  # products go to where they belong: no copy
            torch.bmm(x.expand(H, n, L), self.up_k.mT, out=into[..., :N].transpose(0, 1))
        k[..., N:] = rotary[:, :, None]
        return k, (latent @ self.up_v.flatten(0, 1).mT).unflatten(-1, (H, -1))

    def _fold(self, dk: Tensor, dv: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of latents ``[B, n, 1, L]`` and rotary parts ``[B, n, 1, R]`` from those of keys and values."""
        (B, n), N, dtype = dk.shape[:2], self.up_k.shape[1], dk.dtype
        dkn, of_v = dk[..., :N].reshape(B * n, -1), dv.reshape(B * n, -1)
        dlatent = dkn @ self.up_k.flatten(0, 1).to(dtype)
        dlatent.addmm_(of_v, self.up_v.flatten(0, 1).to(dtype))
        flat = latent.reshape(B * n, -1).to(dtype)[None]
        for total, grad in ((self.dup_k, dkn), (self.dup_v, of_v)):
            total += product(grad.mT[None], flat).view_as(total)
        return dlatent.view(B, n, 1, -1), dk[..., N:].sum(2, keepdim=True, dtype=wide(dtype)).to(dtype)


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
            _take(out, self._backward(inner, x.cut(rows), keys, scores, met, out.dq, rows), len(strips) > 1)

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
        out: Sum,
        some: slice,
    ) -> tuple[Tensor, ...]:
        """Add the gradients of some queries to `out`; those of latents and rotary parts, if there are any, of
        ``keys [B, n, 1, L + R]``."""
        N, L = self.up_k.shape[1:]
        part = self._part(inner, x.q, keys, scores, pair)
        if part.empty:
            return ()
        o, lse = part.result()
        share = torch.exp(lse - torch.where(torch.isneginf(x.lse), torch.inf, x.lse))  # of these keys
        low = o.mul_(share.mT[..., None])  # it is ours, and large
        do = torch.einsum("bthv,hvl->bthl", x.do, self.up_v)
        delta = None if x.delta is None else x.delta + self._rounded_apart(x.do, do, low)
        rows, values = QueryRows(self._lower(x.q), low, do, x.lse, delta), keys[..., :L]
        grads = Gradients.of(rows.q, keys, values)
        inner.backward(rows, keys, values, scores, pair, grads)
        dq, dk = grads.dq.result(grads.dq.given), grads.dk.result(self._dtype(keys.dtype))
        dlow = dq[..., :L]
        out.add(torch.cat([torch.einsum("bthl,hnl->bthn", dlow, self.up_k.to(dq.dtype)), dq[..., L:]], -1), some)
        self.dup_k += _over_tokens(x.q[..., :N], dlow)
        self.dup_v += _over_tokens(x.do, low)
        dlatent = dk[..., :L]
        return dlatent if grads.dv.empty else dlatent + grads.dv.result(dk.dtype), dk[..., L:]

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


def _take(out: Gradients, found: tuple[Tensor, ...], several: bool) -> None:
    """Add gradients of all keys. Where several are to come, put them together now: they are as long as the keys."""
    for total, grad in zip((out.dk, out.dv), found):
        total.add(grad if several else grad.contiguous())  # as copy engines take it
        if several:
            total.wide()


def _over_tokens(x: Tensor, y: Tensor) -> Tensor:
    """``Σ_t x_th y_thᵀ``, wide ``[H, M, N]``, of ``[B, T, H, M]`` and ``[B, T, H, N]``."""
    return product(x.flatten(0, 1).permute(1, 2, 0), y.flatten(0, 1).transpose(0, 1))


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """``x·y``, wide, ``[B, T, H]``."""
    return (x.to(wide(x.dtype)) * y).sum(-1)


FORMS: dict[str, type[LatentBackend]] = {"expanded": Expanded, "absorbed": Absorbed}
