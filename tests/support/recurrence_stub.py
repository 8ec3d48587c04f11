"""Writes `ring_la/recurrences/__init__.pyi`: for type checkers, the arguments that the decorator hides from them.

python -m tests.support.recurrence_stub && ruff format ring_la/recurrences/__init__.pyi
"""

from __future__ import annotations

import inspect
from pathlib import Path

from ring_la import recurrences

FILE = Path(recurrences.__file__).with_suffix(".pyi")
HEAD = '''"""The linear recurrences, as type checkers see them; written by `python -m tests.support.recurrence_stub`."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..choices import Mode, RecurrenceBackend
from ..context import ShardedLayout
from ..outputs import LinearAttentionOutput
from .definition import Definition

FUNCTIONS: tuple[Callable[..., LinearAttentionOutput], ...]
RECURRENCES: tuple[Definition, ...]
'''


def written(name: str, parameter: inspect.Parameter) -> str:
    """One argument."""
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{name}: {parameter.annotation}{default}"


def function(name: str) -> str:
    """One function."""
    signature, arguments = inspect.signature(getattr(recurrences, name)), []
    for n, p in signature.parameters.items():
        if p.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(written(n, p))
    returns = signature.return_annotation
    return f"def {name}({', '.join(arguments)}) -> {getattr(returns, '__name__', returns)}: ...\n"


def stub() -> str:
    """The file."""
    names = [*recurrences.__all__, "lightning_decay", "retention_decay"]
    return HEAD + "\n" + "".join(function(name) for name in names) + f"\n__all__ = {recurrences.__all__!r}\n"


if __name__ == "__main__":
    FILE.write_text(stub())
