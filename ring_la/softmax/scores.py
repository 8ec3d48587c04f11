"""What turns ``q·k`` into a probability, and which key a query sees: one value that every backend reads.

    s_ij = cap(scale · q_iᵀ k_j) − slope · |p_j − p_i|,      cap(s) = softcap · tanh(s / softcap)
    i sees j  iff  both are of one document  and  −left ≤ p_j − p_i ≤ right

Causal attention is ``right = 0``. Dropout's mask is a hash of (seed, batch row, head, index of i, index of j), so it
is the same however the sequence is split and whenever it is formed again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Reach

BEYOND = {
    "scale": "it needs a scale above 0",
    "softcap": "it has no softcap",
    "alibi_slopes": "it has no ALiBi",
    "dropout_p": "its dropout mask would change with the split",
    "sums": "its gradients of decays would be rounded",
}
"""Fields that add to scale and mask, a scale that is not above 0 among them, and what is said of a kernel that does not
know them."""


class Scores(NamedTuple):
    """The scores of one call. An operator takes its fields as they are, so their types are those of operators.

    Attributes:
        scale, softcap: as above; softcap 0 is none.
        left, right: how many positions back and ahead a query sees; None: all.
        alibi_slopes: wide ``[1 or B, H]`` of the heads at hand.
        dropout_p, seed: the probability to drop, and the seed of its mask, an int64 on the CPU.
        heads: number in the whole model of each head at hand; None: 0, 1, …
        block: where queries choose their keys, how many each choice stands for: it and those behind it.
        sums: where running sums ride behind the channels of q and k, how many channels these have; see `softmax.sums`.
    """

    scale: float
    softcap: float = 0.0
    left: int | None = None
    right: int | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    heads: Tensor | None = None
    block: int = 1
    sums: int = 0

    @property
    def reach(self) -> Reach:
        """Which keys a query sees."""
        return Reach(self.left, self.right)

    @property
    def beyond(self) -> frozenset[str]:
        """What they have of BEYOND."""
        values = {name: getattr(self, name) for name in BEYOND} | {"scale": self.scale <= 0}
        return frozenset(n for n, x in values.items() if x is not None and (isinstance(x, Tensor) or x != 0))

    @property
    def seed_bits(self) -> tuple[int, int]:
        """The low and the high 32 bits of the seed."""
        seed = 0 if self.seed is None else int(self.seed)
        return seed & MASK, (seed >> 32) & MASK

    def of_heads(self, heads: Tensor) -> Scores:
        """The same scores for some of the heads."""
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.index_select(1, heads)
        return self._replace(alibi_slopes=slopes, heads=heads)


def dropout_keep(scores: Scores, batch: int, heads: int, tq: Tensor, tk: Tensor) -> Tensor:
    """The pairs dropout keeps, bool ``[B, H, Tq, Tk]``, for rows at indices `tq` and `tk` of the sequence."""
    device, (low, high) = tq.device, scores.seed_bits
    head = torch.arange(heads, device=device) if scores.heads is None else scores.heads.to(torch.int64)
    row = torch.arange(batch, device=device)[:, None] * 65536 + head[None, :]
    key = mix(mix(row ^ low) ^ high)
    key = mix(key[:, :, None] ^ (tq & MASK)[None, None, :])
    bits = mix(key[..., None] ^ (((tk * 0x9E3779B1) & MASK)[None, None, None, :]))
    return bits >= int(scores.dropout_p * 2**32)


MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)
