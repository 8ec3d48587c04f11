"""How the tokens of one sequence are chosen: its bias and penalties on the logits, then `Sampler`; and what the model
itself said of each token.

Before the temperature, of logits z and numbers c of the times each token was chosen so far (OpenAI's definition),

    z + bias − frequency_penalty · c − presence_penalty · [c > 0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import is_finite, is_int
from ..errors import ArgumentError
from ..inference import Sampler
from .ahead import OnTheWay


class Said(NamedTuple):
    """What the model said of a token, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of the token's probability."""
    top: list[tuple[int, float]]
    """The likeliest tokens and the same of them, the likeliest first."""


@dataclass
class Chooser:
    """Chooses one sequence's tokens, one after the other, on the device of its logits.

    Attributes:
        sampler: what chooses, after bias and penalties.
        bias: added to the logits of some tokens. presence, frequency: see the module's text.
        logprobs: how many of the likeliest tokens to tell of beside the one that is chosen; None: tell nothing.
    """

    sampler: Sampler
    bias: Mapping[int, float]
    presence: float = 0.0
    frequency: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("presence_penalty", self.presence), ("frequency_penalty", self.frequency)):
            if not is_finite(value):
                raise ArgumentError(name, "a finite number", repr(value))
        if self.logprobs is not None and not is_int(self.logprobs, 0):
            raise ArgumentError("logprobs", "an int ≥ 0 or None", repr(self.logprobs))
        self._penalised = bool(self.presence or self.frequency)
        self._bias: tuple[Tensor, Tensor] | None = None
        self._counts: Tensor | None = None
        self._last: OnTheWay | None = None

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest of the logits as they are, and tells nothing."""
        return self.sampler.greedy and not self.bias and not self._penalised and self.logprobs is None

    def __call__(self, logits: Tensor) -> Tensor:
        """The token ``[1]`` after logits ``[1, vocab_size]``; −1: none can be drawn. The host waits for nothing."""
        token = self._drawn(self._changed(logits))
        if self._penalised:
            self._counts[token] += 1
        if self.logprobs is not None:
            logprobs = logits[0].float().log_softmax(-1)
            best = logprobs.topk(min(self.logprobs, len(logprobs)))
            told = logprobs[token], best.values, best.indices
            self._last = OnTheWay(torch.cat([x.double() for x in told]))
        return token

    def said(self) -> Said | None:
        """What the model said of the last token; None if nobody wants to know."""
        if self._last is None:
            return None
        own, *best = self._last.there().tolist()
        n = len(best) // 2
        return Said(own, list(zip(map(int, best[n:]), best[:n])))

    def _drawn(self, logits: Tensor) -> Tensor:
        """What the sampler draws: as `torch.multinomial`, which would wait for the device, draws one."""
        if self.sampler.greedy:
            return self.sampler(logits)
        weights = self.sampler.weights(logits)
        token = (weights / torch.empty_like(weights).exponential_(generator=self.sampler.generator)).argmax(-1)
        return torch.where(weights.sum(-1) > 0, token, -1)

    def _changed(self, logits: Tensor) -> Tensor:
        if not self.bias and not self._penalised:
            return logits
        logits = logits.float()
        if self.bias:
            if self._bias is None:
                tokens, values = zip(*self.bias.items())
                self._bias = torch.tensor(tokens, device=logits.device), logits.new_tensor(values)
            logits = logits.index_add(1, self._bias[0], self._bias[1][None])
        if self._penalised:
            if self._counts is None:
                self._counts = torch.zeros_like(logits[0])
            logits = logits - self.frequency * self._counts - self.presence * (self._counts > 0)
        return logits
