"""What a request hears of: its tokens one after the other, and how it ended."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A token, and the text that is certain with it: none while a character, or a stop string, may be unfinished."""

    token: int
    text: str


class Done(NamedTuple):
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


Event = Piece | Done | Failed
