"""What a recurrence's own arguments are: their shapes in letters, and what kind of numbers they hold.

Letters: B batch rows, T tokens, G heads of q and k, H value heads (a multiple of G), K and V the key and value widths;
any other letter is a size of the recurrence's own. Checks, the token loop, examples, tables and benchmarks read this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..checks import is_floats
from ..errors import ArgumentError, describe_tensor

Kind = Literal["query", "key", "value", "unit value", "normal", "unit", "log decay", "rate"]
Draw = Callable[[Callable[..., Tensor], Mapping[str, Tensor], tuple[int, ...]], Tensor]
"""``draw(normal, drawn, shape)``: an example of an argument; `normal` draws numbers, `drawn` are those before it."""


class Argument(NamedTuple):
    """One tensor of a recurrence.

    Attributes:
        shape: its dimensions, a letter each. Without a T all tokens share it, and its gradient is each rank's part.
        kind: what its numbers are: "query" (what `scale` multiplies), "key", "value", "normal", "unit" (vectors of unit
            length, "unit value": values that are), "log decay" (≤ 0), "rate" (in (0, 1)), or a function that draws an
            example (`Draw`).
    """

    shape: str
    kind: Kind | Draw = "normal"

    @property
    def shared(self) -> bool:
        """Whether all tokens share it."""
        return "T" not in self.shape

    @property
    def values(self) -> bool:
        """Whether it is what states hold: o has its heads and dtype."""
        return self.kind in ("value", "unit value")

    def __str__(self) -> str:
        return "[" + ",".join("Hk" if letter == "G" else letter for letter in self.shape) + "]"


QUERY, KEY, VALUE = Argument("BTGK", "query"), Argument("BTGK", "key"), Argument("BTHV", "value")
DECAY, CHANNEL_DECAY = Argument("BTH", "log decay"), Argument("BTHK", "log decay")
RATE = Argument("BTH", "rate")


def check_arguments(arguments: Mapping[str, Argument], given: Mapping[str, Any]) -> dict[str, int]:
    """Refuse what is no float tensor of its shape, by name; returns the sizes by letter.

    A tensor of H heads may come with G, to be shared like q and k.
    """
    sizes: dict[str, int] = {}
    present = {n: (a, given[n]) for n, a in arguments.items() if given.get(n) is not None or n in given}
    for name, (argument, x) in present.items():
        if not is_floats(x):
            raise ArgumentError(name, "a dense tensor of fp16, bf16, fp32 or fp64", describe_tensor(x))
        if x.dim() != len(argument.shape):
            raise ArgumentError(name, f"{len(argument.shape)} dimensions {argument}", list(x.shape))
        for letter, size in zip(argument.shape, x.shape):
            if letter != "H" or argument.values:
                sizes.setdefault(letter, size)
    sizes.setdefault("H", sizes.get("G", 1))
    sizes.setdefault("G", sizes["H"])
    if sizes["G"] < 1 or sizes["H"] < 1 or sizes["H"] % sizes["G"]:
        name = next(n for n, (a, _) in present.items() if "H" in a.shape)
        raise ArgumentError(name, f"a number of heads that is a multiple of the {sizes['G']} of keys", sizes["H"])
    for name, (argument, x) in present.items():
        if empty := next((letter for letter, n in zip(argument.shape, x.shape) if not n and letter not in "BTV"), None):
            raise ArgumentError(name, f"{argument} with at least one of {empty}", list(x.shape))
    first = next(x for _, x in present.values())
    for name, (argument, x) in present.items():
        wanted = [sizes[letter] for letter in argument.shape]
        fewer = [sizes["G" if letter == "H" else letter] for letter in argument.shape]
        if list(x.shape) not in ([wanted] if argument.values else [wanted, fewer]):
            raise ArgumentError(name, f"{argument} = {wanted}", list(x.shape))
        if x.device != first.device:
            raise ArgumentError(name, f"a tensor on {first.device}", x.device)
    return sizes


def check_heads(arguments: Mapping[str, Argument], given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse, by name, a tensor of H heads that comes with G."""
    for name, argument in arguments.items():
        wanted = [sizes[letter] for letter in argument.shape] if name in given else []
        if wanted and list(given[name].shape) != wanted:
            raise ArgumentError(name, f"{argument} = {wanted}", list(given[name].shape))


def check_declared(arguments: Mapping[str, Argument], names: Collection[str], reserved: Collection[str]) -> None:
    """Refuse a description whose arguments, by name, are not those that are declared of it, or are `reserved`."""
    for name in names:
        if name in reserved:
            raise ArgumentError(name, "a name that is no common keyword's", f"one of {', '.join(reserved)}")
    for name, argument in arguments.items():
        if name not in names:
            raise ArgumentError("arguments", f"names out of the description's, {', '.join(names)}", repr(name))
        letters = isinstance(argument, Argument) and isinstance(argument.shape, str) and argument.shape
        if not letters or not letters.isalpha() or not letters.isupper():
            raise ArgumentError(name, "an Argument whose shape is capital letters, a dimension each", repr(argument))
        if not callable(argument.kind) and argument.kind not in get_args(Kind):
            raise ArgumentError(name, f"a kind out of {', '.join(get_args(Kind))}, or a function", repr(argument.kind))


def state_dtype_of(given: Mapping[str, object]) -> torch.dtype:
    """States are fp32; fp64 where any argument is."""
    wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in given.values())
    return torch.float64 if wide else torch.float32
