"""Types of commands' options for argparse. What is none ends with the option's name, what was expected and what
came."""

from __future__ import annotations

import argparse


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
