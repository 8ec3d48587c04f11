"""How a sequence's next token is drawn, said once more: one row, one token after the other, whole numbers and fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ring_la.models import HybridLM

WORD = 2**64


def mixed(x: int) -> int:
    """SplitMix64's output function."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def exponential(seed: int, position: int, token: int) -> float:
    """The number of a token at a sequence's choice number `position`."""
    number = mixed((mixed(seed % WORD) + (position * 2**32 + token + 1) * 0x9E3779B97F4A7C15) % WORD)
    return -math.log1p(-(number % 2**63) / 2**63)


def left(y: Sequence[float], top_k: int | None, top_p: float) -> list[int]:
    """The tokens that may be drawn of logits over a temperature, the likeliest first, of equals the first token."""
    order = sorted(range(len(y)), key=lambda i: -y[i])
    if top_k is not None and top_k < len(y):
        order = [i for i in order if y[i] >= y[order[top_k - 1]]]
    weights = [math.exp(y[i] - max(y)) for i in order]
    whole = math.fsum(weights)
    return [i for n, i in enumerate(order) if n == 0 or top_p == 1 or math.fsum(weights[:n]) < top_p * whole]


def token(
    logits: torch.Tensor,
    before: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> int:
    """The token that follows those before, of a completion, by ``logits [V]``."""
    y = [
        z + (logit_bias or {}).get(i, 0.0) - frequency_penalty * before.count(i) - presence_penalty * (i in before)
        for i, z in enumerate(logits.double().tolist())
    ]
    if temperature == 0:
        return max(range(len(y)), key=lambda i: y[i])
    y = [x / temperature for x in y]
    return max(
        left(y, top_k, top_p), key=lambda i: math.exp(y[i] - max(y)) / max(exponential(seed, len(before), i), 2**-64)
    )


@torch.no_grad()
def completion(model: HybridLM, ids: Sequence[int], n: int, **options: Any) -> list[int]:
    """What `token` makes of a prompt, the whole text read again for each."""
    out: list[int] = []
    for _ in range(n):
        out.append(token(model(torch.tensor([[*ids, *out]])).logits[0, -1], out, **options))
    return out
