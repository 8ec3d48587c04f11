"""How reading and decoding share the time: a piece of a prompt, then tokens of the batch for about as long."""

from __future__ import annotations

import time

import torch

DECODING = 1.0
"""Seconds of decoding for each second of reading, where both are wanted."""
STEPS = 4
"""Tokens of each sequence, at least, between a piece and the next where the prompt goes on."""
HOLDUP = 0.25
"""Seconds that others' tokens are held up by a piece, about."""
FIRST = 512
"""Tokens a rank reads beside others before it is known how long that takes, and the least."""


class Pace:
    """What is known of the time that pieces take beside others, and what the batch is owed for it.

    Args:
        device: of the model. ranks: that read a prompt together.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._rate: float | None = None  # tokens a second that are read beside others
        self._owed, self._steps = 0.0, 0  # seconds of decoding, and steps, before the next piece

    @property
    def decodes(self) -> bool:
        """Whether it is the batch's turn, before another piece is read."""
        return self._owed > 0 or self._steps > 0

    @property
    def tokens(self) -> int:
        """The most of a piece whose tokens hold up others'."""
        return max(FIRST * self._ranks, int((self._rate or 0) * HOLDUP))

    def read(self, tokens: int, start: float, goes_on: bool) -> None:
        """A piece was read beside others, begun at `start` (`time.monotonic`); whether the prompt has more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.monotonic() - start
        self._rate, self._owed = tokens / max(took, 1e-6), DECODING * took
        self._steps = STEPS if goes_on else 0

    def decoded(self, seconds: float, steps: int = 1) -> None:
        """Each sequence of the batch got so many tokens, which took so long."""
        self._owed, self._steps = self._owed - seconds, self._steps - steps
