"""The exceptions ring_la raises, one tree.

RingLAError
├── ArgumentError (ValueError)         a bad argument: names it, what was expected, what came
│   └── UnsupportedError               a combination this function cannot do; says what would work
├── DisagreementError (RuntimeError)   ranks called with different shapes, dtypes, layouts or documents
├── PeerError (RuntimeError)           another rank died or stalled during an exchange; names it
├── NotFiniteError (ArithmeticError)   `find_nans` saw a NaN or an infinity; names the operator, layer and rank
└── SecondDerivativeError              a gradient of a gradient was asked for (RuntimeError)

`require` raises one where a package is not installed.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor


class RingLAError(Exception):
    """Base of every error ring_la raises on purpose."""


class ArgumentError(RingLAError, ValueError):
    """A bad argument. The message reads ``name: expected …, got …``."""

    def __init__(self, name: str, expected: str, got: object, hint: str = "") -> None:
        self.name, self.expected, self.got, self.hint = name, expected, got, hint
        message = f"{name}: expected {expected}, got {got}"
        super().__init__(f"{message}. {hint}" if hint else message)

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.expected, self.got, self.hint)


class UnsupportedError(ArgumentError):
    """The arguments are well formed, but this combination is not supported; the hint says what is."""


class DisagreementError(RingLAError, RuntimeError):
    """The ranks of a context-parallel group called with arguments that do not fit together."""


class PeerError(RingLAError, RuntimeError):
    """A peer rank died, or did not take part in an exchange within the timeout."""


class NotFiniteError(RingLAError, ArithmeticError):
    """A NaN or an infinity came up in a block of `find_nans`. `first` is a `ring_la.nans.FirstNaN`."""

    def __init__(self, first: object) -> None:
        self.first = first
        super().__init__(str(first))


class SecondDerivativeError(RingLAError, RuntimeError):
    """ring_la's operators have exact first derivatives and refuse second ones."""


def describe_tensor(x: object) -> str:
    """A value in an error message: a tensor's dtype and shape, and its layout if it is not dense, not its numbers."""
    if isinstance(x, Tensor):
        dense = x.layout is torch.strided
        return f"{x.dtype} {list(x.shape)}" if dense else f"{x.dtype} {list(x.shape)}, {x.layout}"
    return repr(x) if x is None or isinstance(x, (int, float, str)) else type(x).__name__


EXTRAS = {
    "pyarrow": "train",
    "safetensors": "export",  # with NumPy, by way of which it writes
    "tokenizers": "train",
    "torchao": "low-memory",
    "transformers": "transformers",
}
"""The extra of ring_la that brings a package, for those that have one."""


def require(module: str, argument: str, what: str) -> None:
    """Refuse an argument where a package is not installed that it needs for `what`."""
    if importlib.util.find_spec(module) is None:
        hint = f"pip install 'ring_la[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"
        raise UnsupportedError(argument, f"an environment with {module} for {what}", "none", hint)


class Facts(NamedTuple):
    """What ranks compare of a tensor, and what an error says of it."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __repr__(self) -> str:  # in a tuple, too
        shape = ", ".join(map(str, self.shape))
        return f"shape [{shape}], dtype {self.dtype}, requires_grad {self.requires_grad}"

    @classmethod
    def of(cls, x: Tensor, tokens: int | None = None) -> Facts:
        """Those of a tensor; `tokens` is the dimension in which ranks may differ, if there is one."""
        shape: tuple[int | str, ...] = tuple(x.shape)
        if tokens is not None:
            tokens %= len(shape)
            shape = (*shape[:tokens], "T", *shape[tokens + 1 :])
        return cls(shape, x.dtype, x.requires_grad)
