"""OpenAI's completions as JSON: what a request may hold, what an answer holds, how an error reads.

Of the protocol's fields those that `Request` has are taken, others where they ask for nothing; `top_k` in requests and
`token_ids` in answers are additions that other servers have too. https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from .completion import Ended, Request
from .text import Text

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "suffix": (None,),
}
"""Fields of the protocol that are not supported, and the values with which they ask for nothing."""

TAKEN = (
    "max_tokens", "model", "prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_k", "top_p",
    "user",
)  # fmt: skip
MAX_STOPS = 4
TEMPERATURES = (0.01, 100)
"""Beyond them logits divided by the temperature leave what fp32 holds, or tell tokens no longer apart."""


class UnknownModel(ArgumentError):
    """A request for another model than the one that is served."""


@dataclass(frozen=True)
class Wanted:
    """A request as it came: what to complete, and how the answer is wanted."""

    request: Request
    stream: bool
    include_usage: bool


def parse(body: object, model: str, text: Text) -> Wanted:
    """A request's JSON.

    Args:
        body: the JSON. model: the served model's name. text: its vocabulary.

    Raises:
        ArgumentError: naming the field.
    """
    if not isinstance(body, Mapping):
        raise ArgumentError("body", "a JSON object", kind(body))
    for name, value in body.items():
        if name in NEUTRAL:
            # True == 1 in Python, and is another thing in JSON
            if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in NEUTRAL[name]):
                neutral = NEUTRAL[name][-1]
                expected = "nothing" if neutral is None else f"nothing or {json_like(neutral)}"
                raise UnsupportedError(name, expected, short(value))
        elif name not in TAKEN:
            raise ArgumentError(str(name), f"one of the fields {', '.join(TAKEN)}", "a field that is not known")
    got = body.get("model")
    if got is not None and got != model:
        raise UnknownModel("model", f"{model!r}, the one that is served", short(got))
    stream = _flag(body, "stream")
    return Wanted(
        Request(
            ids=_prompt(body, text),
            max_tokens=_int(body, "max_tokens", 1, default=16),
            temperature=_temperature(body),
            top_k=_int(body, "top_k", 1, default=None),
            top_p=_top_p(body),
            seed=_int(body, "seed", -(2**63), default=None, most=2**63 - 1),
            stop=_stop(body),
        ),
        stream,
        _include_usage(body, stream),
    )


def _prompt(body: Mapping[str, Any], text: Text) -> list[int]:
    expected, prompt = "a string or a list of token ids", body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise UnsupportedError("prompt", "one prompt", f"{len(prompt)} of them", "Send a request for each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return text.encode(prompt)
    if not isinstance(prompt, list):
        raise ArgumentError("prompt", expected, kind(prompt))
    wrong = next((x for x in prompt if type(x) is not int), None)
    if wrong is not None:
        raise ArgumentError("prompt", expected, f"a list with {kind(wrong)} in it")
    return prompt


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    expected, stop = f"a string, or a list of at most {MAX_STOPS} strings, none of them empty", body.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise ArgumentError("stop", expected, short(stop))
    return tuple(stops)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    expected, options = 'with stream=true, {"include_usage": true or false}', body.get("stream_options")
    if options is None:
        return False
    known = isinstance(options, Mapping) and set(options) <= {"include_usage"}
    if not stream or not known or not isinstance(options.get("include_usage", False), bool):
        raise ArgumentError("stream_options", expected, short(options))
    return options.get("include_usage", False)


def _int(body: Mapping[str, Any], name: str, least: int, default: int | None, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least or (most is not None and value > most):
        expected = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"
        raise ArgumentError(name, expected, short(value))
    return value


def _temperature(body: Mapping[str, Any]) -> float:
    least, most = TEMPERATURES
    value = 1.0 if body.get("temperature") is None else body["temperature"]
    if type(value) not in (int, float) or not (value == 0 or least <= value <= most):
        raise ArgumentError("temperature", f"0 or a number from {least} to {most}", short(value))
    return value


def _top_p(body: Mapping[str, Any]) -> float:
    value = 1.0 if body.get("top_p") is None else body["top_p"]
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise ArgumentError("top_p", "a number above 0 and at most 1", short(value))
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(name, "true or false", short(value))
    return bool(value)


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    kinds = {type(None): "nothing", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return kinds.get(type(value)) or ("a list" if isinstance(value, list) else "an object")


def json_like(value: object) -> str:
    """A value as JSON writes it."""
    return json.dumps(value, ensure_ascii=False)


def short(value: object) -> str:
    """A value in an error message."""
    text = json_like(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# -- answers -----------------------------------------------------------------------------------------------


class Answer:
    """What is said about one completion, whole or in pieces."""

    def __init__(self, model: str) -> None:
        self._same = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def part(self, text: str, ids: list[int], reason: str | None = None) -> dict[str, Any]:
        """A piece of the completion, or all of it; `reason`: why it ended, None while it goes on."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "token_ids": ids}
        return {**self._same, "choices": [choice]}

    def usage(self, done: Ended) -> dict[str, Any]:
        """The last piece of a stream, if asked for."""
        return {**self._same, "choices": [], "usage": usage(done)}


def usage(done: Ended) -> dict[str, Any]:
    """Numbers of tokens."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.reused_tokens},
    }


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error's JSON."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
