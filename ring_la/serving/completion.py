"""A request and what becomes of it: its tokens one after the other, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..checks import check_has, check_kind
from ..errors import ArgumentError, describe_tensor
from ..inference import Sampler
from .sampling import Chooser, Said
from .text import Stream

LOG = logging.getLogger(__name__)


class NewToken(NamedTuple):
    """A token, and the text that is certain with it: none while a character, or a stop string, may be unfinished."""

    token: int
    text: str
    said: Said | None = None
    """What the model said of it, where that is wanted."""


class Ended(NamedTuple):
    """The end: `reason` "stop" (a stop string, or the model's end) or "length"; `text` that was held back."""

    reason: str
    text: str
    prompt_tokens: int
    reused_tokens: int
    """Of the prompt, those whose states were still there."""
    completion_tokens: int
    """Tokens decoded, the one that ended it among them."""


class Failed(NamedTuple):
    """The end, without the request's fault."""

    message: str


class Stopped(Failed):
    """The same, as the server was told to stop: another can answer it."""


Event = NewToken | Ended | Failed


@dataclass(frozen=True)
class Request:
    """What to complete.

    Attributes:
        ids: the prompt, at least one token.
        max_tokens: the most tokens to decode, at least one.
        temperature, top_k, top_p: as in `Sampler`. seed: of the sampling; None: another one each time.
        stop: strings that end the completion.
        logit_bias: what is added to tokens' logits. presence_penalty, frequency_penalty: as in `Chooser`.
        logprobs: tell the logarithms of each token's probability and of so many of the likeliest; None: of none.
    """

    ids: Sequence[int]
    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    @property
    def total(self) -> int:
        """Tokens of the prompt and the longest completion."""
        return len(self.ids) + self.max_tokens

    def sampler(self, generator: torch.Generator | None) -> Chooser:
        """What chooses its tokens. Raises ArgumentError for values that make no sense."""
        sampler = Sampler(self.temperature, self.top_k, generator, self.top_p)
        return Chooser(sampler, self.logit_bias, self.presence_penalty, self.frequency_penalty, self.logprobs)


@dataclass
class Trail:
    """Where a prompt was read, and what is remembered of it: what is left of a request once it is answered.

    Attributes:
        tokens: of the prompt. pieces: the parts of it that were read at once, ``(first, one after the last)``.
        before: the same of the tokens that were not read again, from another prompt. reused: how many those are.
        decoded: tokens that came. ended: whether no more may come.
        kept: the state that was kept last for prompts that begin alike, and its tokens; 0: none.
    """

    tokens: int
    pieces: list[tuple[int, int]] = field(default_factory=list)
    before: tuple[tuple[int, int], ...] = ()
    reused: int = 0
    decoded: int = 0
    ended: bool = False
    kept: tuple[int, int] = (0, 0)


class Completion:
    """A request under way.

    Args:
        request: what to complete.
        emit: called in the engine's thread with each `Event`; the last is `Ended` or `Failed`.
    """

    def __init__(self, request: Request, emit: Callable[[Event], None]) -> None:
        check_kind("request", request, Request)
        check_has("prompt", request.ids, ("__len__", "__iter__"), "token ids, ints")
        if not callable(emit):
            raise ArgumentError("emit", "a function of an Event", describe_tensor(emit))
        self.request, self.emit = request, emit
        self.reused = self.decoded = 0
        self.cancelled = self.over = False  # over: its end was told
        self.stream: Stream | None = None
        self.sampler: Chooser | None = None
        self.trail = Trail(len(request.ids))

    def cancel(self) -> None:
        """Nobody wants it any more; it hears of nothing further. From any thread."""
        self.cancelled = self.trail.ended = True

    def fail(self, message: str, error: Exception | None = None, kind: type[Failed] = Failed) -> None:
        """It ends with a message; the whole of the error is the operator's."""
        self.over = True
        if error is not None:
            LOG.error("a request has failed", exc_info=error)
        try:
            self.emit(kind(message if error is None else f"{message} ({type(error).__name__})"))
        except Exception:  # whoever listens may be gone
            LOG.exception("nobody could be told that %s", message)

    def take(self, token: int, end: frozenset[int]) -> bool:
        """Pass on a token; whether it was the last."""
        self.decoded += 1
        self.trail.reused, self.trail.decoded = self.reused, self.decoded
        if token not in end:
            said = None if self.sampler is None else self.sampler.said()
            self.emit(NewToken(token, self.stream.push(token), said))
        stopped = token in end or self.stream.stopped
        if not stopped and self.decoded < self.request.max_tokens:
            return False
        self.over, reason = True, "stop" if stopped else "length"
        self.emit(Ended(reason, self.stream.rest(), len(self.request.ids), self.reused, self.decoded))
        return True
