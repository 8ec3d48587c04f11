"""What the library calls a cache: `cache` since 5.24, `past_key_values` before, `cache_params` where it has states
alone, and `state` where these are a list of tensors (RWKV-4)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("cache", "past_key_values", "cache_params", "state")
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name in the installed version, for errors."""


def cache_name(forward: Callable) -> str:
    """By which keyword a function of the library takes a cache."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in parameters), CACHE)


def cache_of(keywords: Mapping[str, Any]) -> Any:
    """The cache among keywords; None: there is none."""
    return next((keywords[name] for name in NAMES if keywords.get(name) is not None), None)


def takes_cache(function: Callable) -> Callable:
    """A function of ours with an argument `cache` for what a version of the library calls otherwise."""

    @functools.wraps(function)
    def called(*args, **keywords):
        if "past_key_values" in keywords:
            keywords["cache"] = keywords.pop("past_key_values")
        return function(*args, **keywords)

    return called
