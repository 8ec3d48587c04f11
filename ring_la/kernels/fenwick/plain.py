"""Log-linear attention inside a run of tokens in PyTorch's operations: masks within chunks, and above them blocks that
are added up in pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 6
CHUNK = 1 << BITS


class LogLinearInputs(NamedTuple):
    """Tokens of one run, in fp32 or wider, the scale in q: q, k ``[B, n, H, K]``, v, g ``[B, n, H]``, λ."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    lam: Tensor


def level_of(later: Tensor, earlier: Tensor | int) -> Tensor:
    """Bits of ``later xor earlier``."""
    return torch.frexp((later ^ earlier).double()).exponent.long()


def within(x: LogLinearInputs, position: int) -> Tensor:
    """Outputs of a run that starts at this position, of its own tokens."""
    n, left = x.v.shape[1], position % CHUNK
    right = -(left + n) % CHUNK
    padded = (F.pad(t, (0, 0) * (t.dim() - 2) + (left, right)).unflatten(1, (-1, CHUNK)) for t in x)
    x = LogLinearInputs(*padded)
    o = _above_chunks(x, x.g.cumsum(2), position // CHUNK, _within_chunks(x))
    return o.flatten(1, 2)[:, left : left + n]


def _within_chunks(x: LogLinearInputs) -> Tensor:
    """Tokens of one chunk among themselves, all ``[B, chunks, CHUNK, H, ·]``."""
    here = torch.arange(CHUNK, device=x.v.device)
    level = level_of(here[:, None], here).clamp(max=x.lam.shape[-1] - 1)  # beyond λ there is padding alone
    c = x.g.cumsum(2)
    gap = c[..., None] - c.movedim(2, -1)[:, :, None]  # [B, chunks, t, H, s]
    gap = gap.masked_fill((here[:, None] < here)[:, None], -torch.inf)
    weight = gap.exp() * x.lam.gather(-1, level[:, None].expand(*x.lam.shape[:4], CHUNK))
    scores = torch.einsum("bmthk,bmshk->bmths", x.q, x.k) * weight
    return torch.einsum("bmths,bmshv->bmthv", scores, x.v)


def _above_chunks(x: LogLinearInputs, c: Tensor, first: int, o: Tensor) -> Tensor:
    """`o` and what chunks, the first one the `first` of its document, get of chunks before them.

    Blocks double from level to level. `c` is the decay of each token since its block's start.
    """
    chunks, level, base = x.v.shape[1], BITS, first
    G = c[:, :, -1]
    S = torch.einsum("bmthk,bmthv->bmhkv", x.k * (G[:, :, None] - c).exp()[..., None], x.v)
    while S.shape[1] > 1:
        level += 1
        block = [(first + i) >> (level - BITS - 1) for i in range(chunks)]
        rights = [i for i, b in enumerate(block) if b & 1 and b > base]
        if rights:
            to = torch.tensor(rights, device=o.device)
            beside = torch.tensor([block[i] - 1 - base for i in rights], device=o.device)
            weight = c[:, to].exp() * x.lam[:, to, ..., level]
            o = o.index_add(1, to, torch.einsum("bmthk,bmhkv->bmthv", x.q[:, to] * weight[..., None], S[:, beside]))
            c = c.index_add(1, to, G[:, beside][:, :, None].expand(-1, -1, CHUNK, -1))
        odd, base = base & 1, base >> 1
        after = (odd + S.shape[1]) & 1
        (S1, S2), (G1, G2) = (
            F.pad(t, (0, 0) * (t.dim() - 2) + (odd, after)).unflatten(1, (-1, 2)).unbind(2) for t in (S, G)
        )
        S, G = G2.exp()[..., None, None] * S1 + S2, G1 + G2
    return o
