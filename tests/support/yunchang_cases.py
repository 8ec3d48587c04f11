"""What the tests of yunchang's contract share. Each rank of yunchang holds equally many tokens: `draw` makes the whole
sequence, `places` says what a rank holds."""

from __future__ import annotations

import torch

from ring_la import reference
from ring_la.integrations import yunchang
from tests.support.attention_cases import error

B, T, H, D = 2, 48, 4, 8
DENSE = {
    "contiguous": (yunchang.RingFlashAttnFunc, yunchang.ring_flash_attn_func),
    "zigzag": (yunchang.ZigZagRingFlashAttnFunc, yunchang.zigzag_ring_flash_attn_func),
    "stripe": (yunchang.StripeFlashAttnFunc, yunchang.stripe_flash_attn_func),
}
DOCUMENTS = (0, 16, 24, 48)
"""Offsets of packed documents, each a multiple of 2 × 4 tokens."""
MASKS = {
    "causal": (dict(causal=True), dict(causal=True)),
    "full": (dict(), dict(causal=False)),
    "window": (dict(causal=True, window_size=(7, 0)), dict(causal=True, window=(7, -1))),
    "window both": (dict(window_size=(7, 9)), dict(causal=False, window=(7, 9))),
    "softcap": (dict(causal=True, softcap=1.5, softmax_scale=0.3), dict(causal=True, softcap=1.5, scale=0.3)),
}


def draw(heads: tuple[int, int] = (H, H), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(B, T, heads[0], D), (B, T, heads[1], D), (B, T, heads[1], D), (B, T, heads[0], D)]
    return [torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes]


def places(kind: str, rank: int, P: int, length: int = T, start: int = 0) -> torch.Tensor:
    """Tokens of the sequence that a rank holds."""
    t = torch.arange(start, start + length)
    if kind == "zigzag":
        halves = t.chunk(2 * P)
        return torch.cat([halves[rank], halves[2 * P - 1 - rank]])
    return t[rank::P] if kind == "stripe" else t.chunk(P)[rank]


def packed_places(kind: str, rank: int, P: int) -> torch.Tensor:
    return torch.cat([places(kind, rank, P, b - a, a) for a, b in zip(DOCUMENTS, DOCUMENTS[1:])])


def truth(tensors: list[torch.Tensor], cu=None, **keywords) -> list[torch.Tensor]:
    """o, lse and the gradients of the whole."""
    *qkv, do = (t.double() for t in tensors)
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = reference.attention(*leaves, cu_seqlens=cu, **keywords)
    return [out.o.detach(), out.lse.detach(), *torch.autograd.grad((out.o * do).sum(), leaves)]


def leaves_of(tensors: list[torch.Tensor], at: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    *qkv, do = (t[:, at] for t in tensors)
    return [t.clone().requires_grad_() for t in qkv], do


def compare(got: list, want: list, at: torch.Tensor) -> list[float]:
    parts = [w[:, :, at] if i == 1 else w[:, at] for i, w in enumerate(want)]
    return [error(g, w) for g, w in zip(got, parts)]
