"""A tape as one function, whose code is written for it: its allocations and launches line by line.

To go through a list of launches and through the arguments of each takes the host longer than the launches themselves
(23 of 47 µs of a call with four of them). In code that was written for them a number stands where it is used, and an
address is one addition:

    t4 = T[4] = empty(shape4, strides4, dtype4); b4 = B[4] = t4.data_ptr()
    launch1(8, 4, 1, stream, *rest1, b1, b2, b4 + 4096, 32768)

The code has nothing but numbers and names of its own in it; what is no whole number is given by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ring_la.kernels.runtime.triton_version import FIRST, STREAM

Play = Callable[[Any], None]
"""What does a step's allocations and work on a `tape.Playback` that has room for it."""

FAST = {"cuda": "_empty_strided_cuda", "cpu": "_empty_strided_cpu"}
"""What torch.compile's own code allocates with: half the host's time of `Tensor.new_empty_strided`, a third of
`torch.empty`'s. On the current device."""


@functools.cache
def allocator(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None:
    """What allocates (shape, strides, dtype) on the current device of a kind; None: this torch has none of these."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, FAST.get(kind, ""), None)


class Writes(Protocol):
    """What a tape does."""

    def write(self, written: Written) -> None:
        """Its line."""


class Written:
    """The lines of a tape's function, and the names in them."""

    def __init__(self, kind: str) -> None:
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self._known: set[int] = set()
        self._fast = allocator(kind)
        if self._fast is not None:
            self.names["empty"] = self._fast

    def name(self, what: str, x: Any) -> str:
        """A name for what no number is."""
        name = f"{what}{len(self.names)}"
        self.names[name] = x
        return name

    def base(self, number: int) -> str:
        """The address of a tensor."""
        if number not in self._known:
            self.lines.append(f"b{number} = B[{number}]")
            self._known.add(number)
        return f"b{number}"

    def room(self, number: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        """An allocation."""
        kind = self.name("dtype", dtype)
        made = f"empty({tuple(shape)}, {tuple(strides)}, {kind if self._fast else f'dtype={kind}'})"
        self.lines += [f"t = T[{number}] = {made}", f"b{number} = B[{number}] = t.data_ptr()"]
        self._known.add(number)

    def launch(self, one: Any) -> None:
        """A `tape.TapedLaunch`."""
        start, rest = one.how.direct()
        given = {i: self._address(number, offset) for i, number, offset in one.places}
        given |= {i: f"{self.name('maps', maps)}[{self._address(n, offset)}]" for i, n, offset, maps in one.tiles}
        frame = [given.get(i) or self._number(x) for i, x in enumerate(one.frame)]
        stream = "stream" if one.stream is None else str(one.stream.cuda_stream)
        if one.stream is not None:
            self.name("kept", one.stream)
        arguments = [*frame[:STREAM], stream, *map(self._number, rest), *frame[FIRST:]]
        self.lines.append(f"{self.name('launch', start)}({', '.join(arguments)})")

    def other(self, one: Any) -> None:
        """What tapes do in their own words; it may make tensors."""
        self.lines.append(f"{self.name('play', one.play)}(playing)")

    def function(self) -> Play:
        """The lines as a function."""
        head = ["T, B, stream = playing.tensors, playing.bases, playing.stream"]
        if self._fast is None:
            head.append("empty = playing.like.new_empty_strided")
        code = "def play(playing):\n    " + "\n    ".join(head + self.lines)
        made: dict[str, Any] = {}
        exec(compile(code, "<a tape of ring_la>", "exec"), self.names, made)
        return made["play"]

    def _address(self, number: int, offset: int) -> str:
        return f"{self.base(number)} + {offset}" if offset else self.base(number)

    def _number(self, x: Any) -> str:
        return repr(x) if x is None or type(x) in (int, bool) else self.name("x", x)


def function_of(room: Sequence[Any], work: Sequence[Writes], kind: str) -> Play:
    """What makes the room (number, shape, strides, dtype) and does the work of a tape, on a kind of device."""
    written = Written(kind)
    for one in room:
        written.room(*one)
    for step in work:
        step.write(written)
    return written.function()
