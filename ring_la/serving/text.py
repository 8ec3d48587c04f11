"""Between text and tokens: whole prompts one way, the other way a token at a time.

A token may be part of a character, and the beginning of a stop string may turn out to be none, so text comes out when
it is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..checks import check_int, is_int
from ..errors import ArgumentError, UnsupportedError, describe_tensor


class Decoder(Protocol):
    """Text of tokens as they come."""

    def push(self, token: int) -> str:
        """The text that is certain with this token."""

    def rest(self) -> str:
        """The text left at the end."""


class Turn(NamedTuple):
    """A conversation as a prompt, which ends where the answer begins."""

    ids: list[int]
    stop: tuple[str, ...] = ()
    """Strings that end the answer where the vocabulary has no token that does."""


Messages = Sequence[Mapping[str, str]]
"""A conversation: each message's "role" ("system", "user" or "assistant") and "content", perhaps a "name"."""


class Text(Protocol):
    """A vocabulary.

    Attributes:
        end: tokens after which nothing follows. has_text: whether there is text at all.
    """

    end: frozenset[int]
    has_text: bool

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def chat(self, messages: Messages) -> Turn:
        """The tokens of a conversation. Raises UnsupportedError where nothing says how it is written."""

    def decoder(self) -> Decoder:
        """A new one for each completion."""

    def token(self, token: int) -> tuple[str, bytes | None]:
        """A token alone, in a way that tells it from others; its bytes if they are known."""


def checked_end(end: object) -> frozenset[int]:
    """The tokens that end a text, after refusing what are none."""
    if not isinstance(end, (set, frozenset)) or not all(is_int(token, 0) for token in end):
        raise ArgumentError("end", "a set of token ids", repr(end))
    return frozenset(end)


def check_stop(stop: object) -> None:
    """Refuse what are no strings that end a text."""
    if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
        raise ArgumentError("stop", "a tuple of strings, none of them empty", repr(stop))


class NoText:
    """Token ids only: what a model without a tokenizer takes and gives."""

    has_text = False

    def __init__(self, end: frozenset[int] = frozenset()) -> None:
        self.end = checked_end(end)

    def encode(self, text: str) -> list[int]:
        hint = "The model has no tokenizer; a vocabulary of 256 or 257 tokens is taken for bytes"
        raise UnsupportedError("prompt", "a list of token ids", "text", hint)

    def chat(self, messages: Messages) -> Turn:
        raise _no_template("a model without a tokenizer")

    def decoder(self) -> Decoder:
        return _Silence()

    def token(self, token: int) -> tuple[str, bytes | None]:
        return f"token_id:{token}", None


def _no_template(got: str) -> UnsupportedError:
    hint = "Write the conversation as a prompt of /v1/completions"
    return UnsupportedError("messages", "a model with a chat template", got, hint)


class _Silence:
    def push(self, token: int) -> str:
        return ""

    def rest(self) -> str:
        return ""


class Bytes:
    """A token a byte of UTF-8; token 256, where there is one and no others are named, ends a document."""

    has_text = True

    def __init__(self, vocab_size: int, end: frozenset[int] = frozenset()) -> None:
        check_int("vocab_size", vocab_size, 1)
        self.end = checked_end(end) or frozenset({256} if vocab_size > 256 else ())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Messages) -> Turn:
        said = "".join(f"{m['role']}:\n{m['content']}\n\n" for m in messages)
        return Turn(self.encode(f"{said}assistant:\n"), ("\n\nuser:\n", "\n\nsystem:\n"))

    def decoder(self) -> Decoder:
        return _ByteDecoder()

    def token(self, token: int) -> tuple[str, bytes | None]:
        if token > 255:
            return f"token_id:{token}", None
        return chr(token) if token < 128 else f"bytes:\\x{token:02x}", bytes([token])


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < 256 else ""

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)


class Subwords:
    """A tokenizer of a library.

    Args:
        encode, decode: its functions, special tokens added to a prompt and left out of a text. end: see `Text`.
        template: the tokens of a conversation; None: nothing says how one is written.
    """

    has_text = True

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        end: frozenset[int],
        template: Callable[[Messages], list[int]] | None = None,
    ) -> None:
        for name, given in (("encode", encode), ("decode", decode), ("template", template)):
            if not callable(given) and not (given is None and name == "template"):
                raise ArgumentError(name, "a function", describe_tensor(given))
        self.encode, self.decode, self.end, self._template = encode, decode, checked_end(end), template

    def chat(self, messages: Messages) -> Turn:
        if self._template is None:
            raise _no_template("a tokenizer without a chat template")
        return Turn(self._template(messages))

    def token(self, token: int) -> tuple[str, bytes | None]:
        text = self.decode([token])
        if not text or "\N{REPLACEMENT CHARACTER}" in text:  # a special token, or part of a character
            return f"token_id:{token}", None
        return text, text.encode()

    def decoder(self) -> Decoder:
        return _SubwordDecoder(self.decode)


class _SubwordDecoder:
    """Tokens from the last piece of text on are decoded again with each new one: what a token says, spaces among it,
    may depend on those before it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._said: list[int] = []
        self._new: list[int] = []

    def push(self, token: int) -> str:
        self._new.append(token)
        text = self._unsaid()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character so far
            return ""
        self._said, self._new = self._new, []
        return text

    def rest(self) -> str:
        return self._unsaid() if self._new else ""

    def _unsaid(self) -> str:
        return self._decode(self._said + self._new)[len(self._decode(self._said)) :]


class Stream:
    """A completion's text up to the first of some stop strings.

    Args:
        decoder: tokens to text. stop: strings that end the completion and are not part of it.

    Attributes:
        stopped: whether one came.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        check_stop(stop)
        self.stopped = False
        self._decoder, self._stop, self._held = decoder, tuple(stop), ""

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._cut(self._decoder.push(token), last=False)

    def rest(self) -> str:
        """The text left at the end."""
        return "" if self.stopped else self._cut(self._decoder.rest(), last=True)

    def _cut(self, text: str, last: bool) -> str:
        text = self._held + text
        found = [i for i in (text.find(s) for s in self._stop) if i >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
