"""Values as the arguments of registered operators, whose schemas know tensors and numbers alone.

A value is a NamedTuple; the operator's arguments are its fields, one after the other, by their names and types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
    "str | None": "str?",
    "LatentForm | None": "str?",
    "ChosenChoice": "str",
    "bool": "bool",
    "Sequence[int]": "SymInt[]",
    "Sequence[float]": "float[]",
}
"""The types of fields as operators name them."""


def declared(*kinds: type, **others: Any) -> str:
    """The names and types of the fields of these, and of others, as a schema has them."""
    fields = {name: t for kind in kinds for name, t in kind.__annotations__.items()} | others
    return ", ".join(f"{TYPES[getattr(t, '__forward_arg__', t)]} {name}" for name, t in fields.items())


def taken_apart(arguments: Iterable[Any], *kinds: Any) -> Iterator[Any]:
    """The values that an operator's arguments are the fields of."""
    rest = iter(arguments)
    return (kind(*islice(rest, len(kind._fields))) for kind in kinds)
