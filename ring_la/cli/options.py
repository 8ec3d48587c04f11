"""What commands' options have in common: their types for argparse, and the figures of an earlier run. What is none ends
with the option's name, what was expected and what came."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


def count(text: str) -> int:
    """A number ≥ 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number ≥ 1, got {text!r}")
    return int(text)


def amount(text: str) -> int:
    """A number ≥ 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number ≥ 0, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Numbers ≥ 1, comma-separated."""
    return [count(word) for word in text.split(",")]


def names(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Names out of `choices`, comma-separated."""

    def chosen(text: str) -> list[str]:
        for word in text.split(","):
            if word not in choices:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(choices)}, got {word!r}")
        return text.split(",")

    return chosen


def earlier(file: Path) -> dict[str, Any]:
    """What a benchmark's --out wrote, for --read: a dictionary with "rows"."""
    try:
        found = json.loads(file.read_text())
        found["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError("read", "what an earlier --out wrote", f"{file} ({error!r})") from error
    return found
