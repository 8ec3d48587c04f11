"""Fields of a request's JSON, each read by its kind: what is wrong is named, with what was expected and what came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError, UnsupportedError

Body = Mapping[str, Any]
MAX_STOPS = 4
TEMPERATURES = (0.01, 100)
"""Beyond them logits divided by the temperature leave what fp32 holds, or tell tokens no longer apart."""


class UnknownModel(ArgumentError):
    """A request for another model than the one that is served."""


def known(body: object, taken: tuple[str, ...], neutral: Mapping[str, tuple[Any, ...]], model: str) -> Body:
    """A request's body, if it is an object of fields that are known, for the served model.

    Args:
        taken: fields that are read. neutral: others of the protocol, and the values with which they ask for nothing.
    """
    if not isinstance(body, Mapping):
        raise ArgumentError("body", "a JSON object", kind(body))
    for name, value in body.items():
        if name in neutral:
            # True == 1 in Python, and is another thing in JSON
            if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral[name]):
                asks = neutral[name][-1]
                expected = "nothing" if asks is None else f"nothing or {json_like(asks)}"
                raise UnsupportedError(name, expected, short(value))
        elif name not in taken:
            raise ArgumentError(cut(name), f"one of the fields {', '.join(taken)}", "a field that is not known")
    user = body.get("user")
    if user is not None and not isinstance(user, str):
        raise ArgumentError("user", "a string", short(user))
    got = body.get("model")
    if got is not None and got != model:
        raise UnknownModel("model", f"{model!r}, the one that is served", short(got))
    return body


def integer(body: Body, name: str, least: int, default: int | None, most: int | None = None) -> int | None:
    """An integer from `least` to `most`."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least or (most is not None and value > most):
        expected = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"
        raise ArgumentError(name, expected, short(value))
    return value


def number(body: Body, name: str, least: float, most: float) -> float:
    """A number from `least` to `most`; 0 where there is none."""
    value = 0.0 if body.get(name) is None else body[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ArgumentError(name, f"a number from {least} to {most}", short(value))
    return value


def flag(body: Body, name: str) -> bool:
    """True or false; false where there is nothing."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(name, "true or false", short(value))
    return bool(value)


def stops(body: Body) -> tuple[str, ...]:
    """ "stop"."""
    expected, stop = f"a string, or a list of at most {MAX_STOPS} strings, none of them empty", body.get("stop")
    if stop is None:
        return ()
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found) or len(found) > MAX_STOPS:
        raise ArgumentError("stop", expected, short(stop))
    return tuple(found)


def include_usage(body: Body, stream: bool) -> bool:
    """ "stream_options"."""
    expected, options = 'with stream=true, {"include_usage": true or false}', body.get("stream_options")
    if options is None:
        return False
    understood = isinstance(options, Mapping) and set(options) <= {"include_usage"}
    if not stream or not understood or not isinstance(options.get("include_usage", False), bool):
        raise ArgumentError("stream_options", expected, short(options))
    return options.get("include_usage", False)


def sampling(body: Body) -> dict[str, Any]:
    """What `completion.Request` wants to know of how tokens are chosen, by its names."""
    return {
        "temperature": _temperature(body),
        "top_k": integer(body, "top_k", 1, default=None),
        "top_p": _top_p(body),
        "seed": integer(body, "seed", -(2**63), default=None, most=2**63 - 1),
        "logit_bias": _logit_bias(body),
        "presence_penalty": number(body, "presence_penalty", -2, 2),
        "frequency_penalty": number(body, "frequency_penalty", -2, 2),
    }


def _temperature(body: Body) -> float:
    least, most = TEMPERATURES
    value = 1.0 if body.get("temperature") is None else body["temperature"]
    if type(value) not in (int, float) or not (value == 0 or least <= value <= most):
        raise ArgumentError("temperature", f"0 or a number from {least} to {most}", short(value))
    return value


def _top_p(body: Body) -> float:
    value = 1.0 if body.get("top_p") is None else body["top_p"]
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise ArgumentError("top_p", "a number above 0 and at most 1", short(value))
    return value


def _logit_bias(body: Body) -> dict[int, float]:
    bias = {} if body.get("logit_bias") is None else body["logit_bias"]
    good = isinstance(bias, Mapping) and all(map(_is_bias, bias, bias.values()))
    if not good:
        raise ArgumentError("logit_bias", "an object of token ids with numbers from -100 to 100", short(bias))
    return {int(token): value for token, value in bias.items()}


def _is_bias(token: str, value: object) -> bool:
    """Whether a token's id and what is added to its logit are some."""
    return token.isdecimal() and len(token) < 10 and type(value) in (int, float) and -100 <= value <= 100  # type: ignore


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    kinds = {type(None): "nothing", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return kinds.get(type(value)) or ("a list" if isinstance(value, list) else "an object")


def json_like(value: object) -> str:
    """A value as JSON writes it."""
    return json.dumps(value, ensure_ascii=False)


def short(value: object) -> str:
    """A value in an error message."""
    try:
        return cut(json_like(value))
    except RecursionError:  # what could just be read may be too deep to be written
        return f"{kind(value)}, too deep to be told"


def cut(text: str) -> str:
    """A text of a client's in an error message."""
    return text if len(text) <= 80 else f"{text[:77]}…"
