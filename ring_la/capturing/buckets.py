"""Lengths that the tensors of a captured step are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError


@dataclass(frozen=True)
class Buckets:
    """Lengths that tensors are padded to, so that few graphs do for many lengths.

    Attributes:
        lengths: the lengths there are. The smallest that holds a call's tokens is taken.
        pad: the arguments of the step that are padded, by name, and with what: ``{"ids": 0, "targets": -100}``.
        dim: the dimension of the tokens.
    """

    lengths: Sequence[int]
    pad: Mapping[str, float]
    dim: int = 1

    def __post_init__(self) -> None:
        good = isinstance(self.lengths, Sequence) and all(isinstance(n, int) and n > 0 for n in self.lengths)
        if not good or not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ArgumentError("lengths", "ints > 0 that increase", repr(self.lengths))
        numbers = isinstance(self.pad, Mapping) and all(isinstance(x, (int, float)) for x in self.pad.values())
        if not numbers or not self.pad:
            raise ArgumentError("pad", "names of arguments and the number each is padded with", repr(self.pad))
        if not isinstance(self.dim, int):
            raise ArgumentError("dim", "an int", repr(self.dim))

    def padded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, those of `pad` at one of the lengths."""
        for name, value in self.pad.items():
            self._check(name, arguments.get(name), value)
        found = {name: arguments[name].shape[self.dim] for name in self.pad}
        length = max(found.values())
        if len(set(found.values())) > 1:
            raise ArgumentError("pad", "arguments of one length", found)
        if length > self.lengths[-1]:
            name = next(iter(self.pad))
            raise ArgumentError(name, f"at most {self.lengths[-1]} tokens, the longest of lengths", length)
        target = self.lengths[bisect_left(self.lengths, length)]
        return {**arguments, **{n: self._filled(arguments[n], target, value) for n, value in self.pad.items()}}

    def _check(self, name: str, x: Any, value: float) -> None:
        if not isinstance(x, Tensor):
            raise ArgumentError(name, "a tensor, which is to be padded", type(x).__name__)
        if not -x.dim() <= self.dim < x.dim():
            raise ArgumentError(name, f"a tensor with dimension {self.dim}, which is padded", list(x.shape))
        if not x.is_floating_point() and not float(value).is_integer():
            raise ArgumentError("pad", f"an integer for {name}, whose dtype is {x.dtype}", value)

    def _filled(self, x: Tensor, length: int, value: float) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = length - shape[self.dim]
        return torch.cat([x, x.new_full(shape, value)], self.dim) if shape[self.dim] else x
