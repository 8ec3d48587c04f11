"""Random numbers that follow from a seed and a place alone, of many sequences at once: without a generator, so that a
CUDA graph has others at each replay, and a sequence the same whoever is beside it.

Token i at a sequence's p-th choice, from 0, has number p · 2³² + i of SplitMix64 (Steele, Lea and Flood 2014, Fast
Splittable Pseudorandom Number Generators, §4), whose state begins at that generator's mix of the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MOST = 2**63 - 1


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63


STRIDE = _signed(GAMMA << 32)
"""From a choice's stream to the next one's."""
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def stream(seed: int) -> int:
    """Where the numbers of a seed, an int of 64 bits, begin."""
    return int(_mix(torch.tensor([_signed(seed)], device="cpu")))


def places(tokens: int, device: torch.device) -> Tensor:
    """What tokens' numbers add to a stream, int64 ``[V]``."""
    return torch.arange(1, tokens + 1, device=device) * _signed(GAMMA)


def minus_exponential(streams: Tensor, places: Tensor) -> Tensor:
    """Exponential numbers, all of them below 0, fp32 ``[N, V]``, of int64 ``streams [N, 1]`` and ``places [V]``."""
    x = _mix(streams + places).bitwise_and_(MOST).float()
    return x.mul_(-(2.0**-63)).clamp_(2.0**-24 - 1, -(2.0**-64)).log1p_()  # small ones are as exact as large ones


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's, over what is given; its shifts bring zeros, those of int64 the sign."""
    x.bitwise_xor_((x >> 30).bitwise_and_(2**34 - 1)).mul_(FIRST)
    x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1)).mul_(SECOND)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))
