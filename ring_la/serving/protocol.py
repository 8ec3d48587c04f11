"""OpenAI's completions and chat completions as JSON: what a request may hold.

Of the protocol's fields those that `Request` has are taken, others where they ask for nothing; `top_k` in requests and
`token_ids` in answers are additions that other servers have too. https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import ArgumentError, UnsupportedError
from .completion import Request
from .fields import Body, cut, flag, include_usage, integer, kind, known, sampling, short, stops
from .text import Messages, Text, Turn

ALIKE = ("logit_bias", "model", "n", "presence_penalty", "frequency_penalty", "seed", "stop", "stream",
         "stream_options", "temperature", "top_k", "top_p", "user")  # fmt: skip
TEXT = tuple(sorted((*ALIKE, "echo", "logprobs", "max_tokens", "prompt")))
"""Fields of a completion."""
CHAT = tuple(sorted((*ALIKE, "logprobs", "max_completion_tokens", "max_tokens", "messages", "top_logprobs")))
"""Fields of a chat completion."""
TEXT_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (None, 1), "suffix": (None,)}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "auto", "none"),
    "tools": (None, []),
}
"""Fields that are not supported, and the values with which they ask for nothing."""

TOP = {"text": 5, "chat": 20}
"""The most of the likeliest tokens that are told of beside each."""
CHAT_TOKENS = 1024
"""The most tokens of a chat's answer where nobody says how many, as far as the model's limit leaves room."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles, and what templates call them."""


class Limits(NamedTuple):
    """What a request is held to."""

    model: str
    """The served model's name."""
    choices: int
    """The most completions of one request."""
    tokens: int | None
    """The most tokens of a prompt and its completion; None: any number."""


@dataclass(frozen=True)
class Wanted:
    """A request as it came: what to complete, and how the answer is wanted.

    Attributes:
        requests: a completion each, those of one prompt side by side. prompts: how many prompts.
        echo: for each request, the text its answer begins with.
        stream, include_usage: as in the protocol.
    """

    requests: list[Request]
    prompts: int
    echo: list[str]
    stream: bool
    include_usage: bool


def parse(body: object, limits: Limits, text: Text) -> Wanted:
    """A completion's JSON.

    Args:
        body: the JSON. text: the model's vocabulary.

    Raises:
        ArgumentError: naming the field.
    """
    fields = known(body, TEXT, TEXT_NEUTRAL, limits.model)
    asked = _prompts(fields)
    turns = [Turn(text.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in asked]
    echo = [""] * len(asked)
    if flag(fields, "echo"):
        if fields.get("logprobs") is not None:
            raise UnsupportedError("logprobs", "nothing together with echo", short(fields["logprobs"]))
        echo = [prompt if isinstance(prompt, str) else _said(prompt, text) for prompt in asked]
    logprobs = integer(fields, "logprobs", 0, default=None, most=TOP["text"])
    return _wanted(fields, limits, turns, echo, max_tokens=integer(fields, "max_tokens", 1, 16), logprobs=logprobs)


def parse_chat(body: object, limits: Limits, text: Text) -> Wanted:
    """A chat completion's JSON; the same."""
    fields = known(body, CHAT, CHAT_NEUTRAL, limits.model)
    turn = text.chat(_messages(fields))
    most = max(1, CHAT_TOKENS if limits.tokens is None else min(CHAT_TOKENS, limits.tokens - len(turn.ids)))
    tokens = integer(fields, "max_completion_tokens", 1, integer(fields, "max_tokens", 1, most))
    top, logprobs = integer(fields, "top_logprobs", 0, default=None, most=TOP["chat"]), flag(fields, "logprobs")
    if top is not None and not logprobs:
        raise ArgumentError("top_logprobs", "with logprobs=true", short(top))
    return _wanted(fields, limits, [turn], [""], max_tokens=tokens, logprobs=(top or 0) if logprobs else None)


def _wanted(fields: Body, limits: Limits, turns: Sequence[Turn], echo: Sequence[str], **more: Any) -> Wanted:
    """Each prompt so many times; the i-th with the i-th seed from the one that is given."""
    n, stream = integer(fields, "n", 1, default=1), flag(fields, "stream")
    if n * len(turns) > limits.choices:
        name, got = ("n", n) if n > 1 else ("prompt", f"{len(turns)} prompts")
        raise ArgumentError(name, f"at most {limits.choices} completions in one request", got)
    same, stop = sampling(fields) | more, stops(fields)
    requests = []
    for turn in turns:
        first = Request(turn.ids, stop=(*stop, *turn.stop), **same)
        seeds = (None if first.seed is None else (first.seed + i + 2**63) % 2**64 - 2**63 for i in range(n))
        requests += [replace(first, seed=seed) for seed in seeds]
    return Wanted(
        requests, len(turns), [said for said in echo for _ in range(n)], stream, include_usage(fields, stream)
    )


def _prompts(fields: Body) -> list[str | list[int]]:
    expected, prompt = "a string or a list of token ids, or a list of such", fields.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts: list[Any] = list(prompt) if several else [prompt]
    for each in prompts:
        if isinstance(each, str):
            continue
        if not isinstance(each, list):
            raise ArgumentError("prompt", expected, kind(each))
        wrong = next((kind(x) for x in each if type(x) is not int), None)
        if wrong is not None:
            raise ArgumentError("prompt", expected, f"a list with {wrong} in it")
    return prompts


def _said(ids: Sequence[int], text: Text) -> str:
    """The text of token ids, as far as they are some."""
    decoder = text.decoder()
    return "".join([*map(decoder.push, ids), decoder.rest()])


def _messages(fields: Body) -> Messages:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else kind(messages)
        raise ArgumentError("messages", "a list of at least one message", got)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ArgumentError(name, 'an object with "role" and "content"', kind(message))
    # clients send an answer back with all its fields, most of them null
    other = next((key for key, value in message.items() if key not in ("role", "content", "name") and value), None)
    if other is not None:
        raise UnsupportedError(f"{name}.{cut(other)}", "nothing", short(message[other]))
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ArgumentError(f"{name}.role", f"one of {', '.join(ROLES)}", short(role))
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ArgumentError(f"{name}.content", "a string, or a list of parts of text", kind(content))
    said = message.get("name")
    if said is not None and not isinstance(said, str):
        raise ArgumentError(f"{name}.name", "a string", short(said))
    return {"role": ROLES[role], "content": content} | ({} if said is None else {"name": said})


def _part(name: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise UnsupportedError(name, '{"type": "text", "text": …}', short(part))
    return part["text"]
