"""What turns ``q·k`` into a probability, and which key a query sees: one value that every backend reads.

    s_ij = cap(scale · q_iᵀ k_j) − slope · |p_j − p_i|,      cap(s) = softcap · tanh(s / softcap)
    i sees j  iff  both are of one document  and  −left ≤ p_j − p_i ≤ right

Causal attention is ``right = 0``. Dropout's mask is a hash of (seed, batch row, head, index of i, index of j), so it
is the same however the sequence is split and whenever it is formed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tokens import ANY_DOCUMENT


@dataclass(frozen=True)
class Scores:
    """The scores of one call.

    Attributes:
        scale, softcap: as above; softcap 0 is none.
        left, right: how many positions back and ahead a query sees; None: all.
        alibi_slopes: fp32 ``[1 or B, H]`` of the heads at hand.
        dropout_p, seed: the probability to drop, and the seed of its mask.
        heads: number in the whole model of each head at hand; None: 0, 1, …
    """

    scale: float
    softcap: float = 0.0
    left: int | None = None
    right: int | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    heads: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a probability needs nothing but scale and mask."""
        return not self.softcap and self.alibi_slopes is None and not self.dropout_p

    @property
    def windowed(self) -> bool:
        return self.left is not None or self.right not in (None, 0)

    def of_heads(self, heads: Tensor) -> Scores:
        """The same scores for some of the heads."""
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.index_select(1, heads)
        return replace(self, alibi_slopes=slopes, heads=heads)

    def visible(self, distance: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Mask of pairs from ``p_j − p_i`` and the documents of rows ``q [Tq]`` and ``k [Tk]``."""
        seen = (q[:, None] == k[None, :]) | (k == ANY_DOCUMENT)[None, :]
        if self.right is not None:
            seen &= distance <= self.right
        if self.left is not None:
            seen &= distance >= -self.left
        return seen


def dropout_keep(scores: Scores, batch: int, heads: int, tq: Tensor, tk: Tensor) -> Tensor:
    """The pairs dropout keeps, bool ``[B, H, Tq, Tk]``, for rows at indices `tq` and `tk` of the sequence."""
    device = tq.device
    head = torch.arange(heads, device=device) if scores.heads is None else scores.heads.to(torch.int64)
    row = torch.arange(batch, device=device)[:, None] * 65536 + head[None, :]
    key = mix(mix(row ^ (scores.seed & MASK)) ^ ((scores.seed >> 32) & MASK))
    key = mix(key[:, :, None] ^ (tq & MASK)[None, None, :])
    bits = mix(key[..., None] ^ (((tk * 0x9E3779B1) & MASK)[None, None, None, :]))
    return bits >= int(scores.dropout_p * 2**32)


MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)
