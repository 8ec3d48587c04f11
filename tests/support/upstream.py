"""What tests of yunchang's contract share, on CPUs and GPUs: our Functions by split, and what a rank holds."""

from __future__ import annotations

import torch

from ring_la.integrations import yunchang

DENSE = {
    "contiguous": (yunchang.RingFlashAttnFunc, yunchang.ring_flash_attn_func),
    "zigzag": (yunchang.ZigZagRingFlashAttnFunc, yunchang.zigzag_ring_flash_attn_func),
    "stripe": (yunchang.StripeFlashAttnFunc, yunchang.stripe_flash_attn_func),
}


def places(kind: str, rank: int, P: int, length: int, start: int = 0) -> torch.Tensor:
    """Tokens ``start … start + length − 1`` of the sequence that a rank holds."""
    t = torch.arange(start, start + length)
    if kind == "zigzag":
        halves = t.chunk(2 * P)
        return torch.cat([halves[rank], halves[2 * P - 1 - rank]])
    return t[rank::P] if kind == "stripe" else t.chunk(P)[rank]
