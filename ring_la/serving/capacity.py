"""What a server takes on: how long, how many, how much at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral

from ..checks import check_int, is_int
from ..errors import ArgumentError, describe_tensor
from .completion import Request
from .model import Served
from .text import Text, check_stop
from .tiers import Keep


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the arguments of `Engine` say, checked.

    Attributes:
        max_tokens, room, piece, batch, waiting, keep, patience: as there.
    """

    max_tokens: int | None
    room: int | None
    piece: int | None
    batch: int
    waiting: int
    keep: Keep
    patience: float

    def __post_init__(self) -> None:
        for name, value, least in (("batch", self.batch, 1), ("waiting", self.waiting, 1)):
            check_int(name, value, least)
        for name, value in (("max_tokens", self.max_tokens), ("room", self.room), ("piece", self.piece)):
            if value is not None and not is_int(value, 1):
                raise ArgumentError(name, "an int ≥ 1 or None", repr(value))
        self.keep.checked()
        if not isinstance(self.patience, (int, float)) or isinstance(self.patience, bool) or not self.patience >= 0:
            raise ArgumentError("patience", "a number ≥ 0", repr(self.patience))

    def of(self, model: Served) -> Capacity:
        """These with a model: no longer than it knows, one sequence where its states cannot be joined, nothing kept
        where they cannot be read on, and prompts read at once where that is not split.

        Raises:
            ArgumentError: more tokens than the model knows.
        """
        known = model.max_tokens
        if self.max_tokens is not None and known is not None and self.max_tokens > known:
            raise ArgumentError("max_tokens", f"at most {known}, what the model knows", self.max_tokens)
        most = min((n for n in (self.max_tokens, self.room, known) if n is not None), default=None)
        capacity = replace(self, max_tokens=most)
        capacity = capacity if model.flexible else replace(capacity, batch=1)
        capacity = capacity if model.resumes else replace(capacity, keep=Keep())
        return capacity if model.goes_on else replace(capacity, piece=None)

    def check(self, request: Request, model: Served, text: Text) -> None:
        """Raises ArgumentError for a request that cannot be completed, by the argument's name."""
        ids, vocab_size = request.ids, model.vocab_size
        _check_types(request)
        if len(ids) == 0:
            raise ArgumentError("prompt", "at least one token", "none")
        for name, tokens in (("prompt", ids), ("logit_bias", request.logit_bias or [0])):
            wrong = next((i for i in (min(tokens), max(tokens)) if not 0 <= i < vocab_size), None)
            if wrong is not None:
                raise ArgumentError(name, f"token ids from 0 to {vocab_size - 1}", wrong)
        if request.max_tokens < 1:
            raise ArgumentError("max_tokens", "an int ≥ 1", request.max_tokens)
        if self.max_tokens is not None and request.total > self.max_tokens:
            expected = f"at most {self.max_tokens} tokens together with max_tokens"
            raise ArgumentError("prompt", expected, f"{len(ids)} + {request.max_tokens}")
        check_stop(request.stop)
        if request.stop and not text.has_text:
            raise ArgumentError("stop", "nothing for a model without a tokenizer", list(request.stop))
        request.sampler(None)

    def fit(self, tokens: Iterable[int]) -> bool:
        """Whether there is memory for requests of so many tokens side by side."""
        return self.room is None or sum(tokens) <= self.room


def _is_int(x: object) -> bool:
    return type(x) is int or (isinstance(x, Integral) and not isinstance(x, bool))


def _check_types(request: Request) -> None:
    """Refuse what the engine's thread could not count with: it would end for everybody."""
    for i in request.ids:
        if not _is_int(i):
            raise ArgumentError("prompt", "token ids, ints", f"{describe_tensor(i)} among them")
    if not _is_int(request.max_tokens):
        raise ArgumentError("max_tokens", "an int ≥ 1", repr(request.max_tokens))
    if request.seed is not None and not (_is_int(request.seed) and -(2**63) <= request.seed < 2**63):
        raise ArgumentError("seed", "an int of 64 bits, or None", repr(request.seed))
    bias = request.logit_bias or {}
    if not isinstance(bias, Mapping):
        raise ArgumentError("logit_bias", "a number for each of some tokens", type(bias).__name__)
    for token, value in bias.items():
        if not _is_int(token) or not isinstance(value, (int, float)) or value != value:
            raise ArgumentError("logit_bias", "a number for each of some tokens", f"{token!r}: {value!r}")
