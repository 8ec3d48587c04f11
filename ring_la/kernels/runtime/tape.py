"""A call's work on the device, written down once and done again without the Python that led to it.

What a kernel's host code does (allocations, launches, a few of torch's operations) depends on shapes, dtypes and flags
alone, never on values. A `Recorder` (see `recorder`) watches it once; a `Tape` repeats it on other tensors with one
allocation for all that nobody sees afterwards, laid out by when each part was needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.runtime.triton_version import (
    FIRST,
    STREAM,
    CompiledKernel,
    DescribedMemory,
    InterpretedKernel,
    TensorDescriptor,
    current_stream,
    watched,
)
from ring_la.kernels.runtime.written import Written, function_of

MAPS = 64
"""Encoded descriptors of one argument of a launch that are kept."""


class TensorRef(NamedTuple):
    """A tensor of a tape by its number."""

    number: int


class BufferPart(NamedTuple):
    """Part of a buffer: the buffer's number, bytes from its start."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TapedDescriptor:
    """A tensor descriptor: what its tensor stands for, and how it is read."""

    base: Any
    shape: list[int]
    strides: list[int]
    block: list[int]


class EncodedDescriptors(dict[int, Any]):
    """What a launch takes of a descriptor, by the address it is of: encoded once, since a call's memory tends to lie
    where the last one's lay. At most `MAPS`."""

    def __init__(self, descriptor: TapedDescriptor, encode: Callable[[DescribedMemory], list[Any]] | None) -> None:
        self._descriptor, self._encode = descriptor, encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAPS:
            self.clear()
        found = DescribedMemory(address, self._descriptor.shape, self._descriptor.strides)
        self[address] = found = found if self._encode is None else self._encode(found)[0]
        return found


class Playback:
    """The tensors of a call by number: what the caller brought and what the tapes made. Number 0 is no tensor, but
    where constants count from. `like`: any tensor of the device; `device`: which CUDA device that is, if it is one."""

    __slots__ = ("bases", "device", "like", "stream", "tensors")

    def __init__(self, like: Tensor) -> None:
        self.like, self.device = like, like.device.index if like.is_cuda else None
        self.tensors: list[Tensor | None] = [None]
        self.bases = [0]
        self.stream = 0

    def bring(self, x: Tensor, address: int) -> None:
        """A tensor of the caller, contiguous and aligned; its number is the next."""
        self.tensors.append(x)
        self.bases.append(address)

    def put(self, number: int, x: Tensor) -> None:
        self.tensors[number] = x
        self.bases[number] = x.data_ptr()

    def at(self, place: BufferPart) -> Tensor:
        """A tensor over part of a buffer."""
        size = place.dtype.itemsize * math.prod(place.shape)
        return self.tensors[place.buffer][place.offset : place.offset + size].view(place.dtype).view(place.shape)


class TapedLaunch(NamedTuple):
    """A launch: the frame of `CompiledKernel.start` without addresses, and where in it which tensor's go:
    (index, its number, bytes from its start), or descriptors of what lies there. `stream`: where it goes, if not to the
    caller's."""

    how: CompiledKernel
    frame: list[Any]
    places: tuple[tuple[int, int, int], ...]
    tiles: tuple[tuple[int, int, int, EncodedDescriptors], ...]
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(
        cls, how: CompiledKernel, grid: tuple[int, int, int], args: Sequence[tuple[int, Any]],
        tiles: Mapping[int, TapedDescriptor], stream: torch.cuda.Stream | None,
    ) -> TapedLaunch:  # fmt: skip
        """Each of `args` is a tensor's number and bytes from its start, or 0 and a constant; those of `tiles` are
        descriptors."""
        how, encodings = how.encoding() if tiles else (how, {})
        places: list[tuple[int, int, int]] = []
        maps: list[Any] = []
        flat: list[Any] = []
        for i, (number, offset) in enumerate(args):
            at = FIRST + len(flat)
            if i in tiles:
                maps.append((at, number, offset, EncodedDescriptors(tiles[i], encodings.get(i))))
                flat += [None, *tiles[i].shape, *tiles[i].strides] if encodings else [None]
            elif number:
                places.append((at, number, offset))
                flat.append(0)
            else:
                flat.append(offset)
        return cls(how, how.frame(grid, flat), tuple(places), tuple(maps), stream)

    def play(self, playing: Playback) -> None:
        bases, frame = playing.bases, self.frame.copy()
        for i, number, offset in self.places:
            frame[i] = bases[number] + offset
        for i, number, offset, maps in self.tiles:
            frame[i] = maps[bases[number] + offset]
        frame[STREAM] = playing.stream if self.stream is None else self.stream.cuda_stream
        self.how.start(frame)

    def write(self, written: Written) -> None:
        written.launch(self)


class TapedInterpretedLaunch(NamedTuple):
    """A launch of Triton's interpreter."""

    how: InterpretedKernel
    grid: tuple[int, int, int]
    args: tuple[Any, ...]

    def play(self, playing: Playback) -> None:
        self.how(self.grid, [_filled(x, playing) for x in self.args])

    def write(self, written: Written) -> None:
        written.other(self)


class TapedOrder(NamedTuple):
    """Streams put in order."""

    step: Callable[[], None]

    def play(self, playing: Playback) -> None:
        self.step()

    def write(self, written: Written) -> None:
        written.other(self)


class TapedOperation(NamedTuple):
    """One of torch's operations, and the numbers of what it makes (0: nothing new)."""

    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    out: tuple[int, ...]

    def play(self, playing: Playback) -> None:
        out = self.function(*[_filled(x, playing) for x in self.args], **self.keywords)
        for number, x in zip(self.out, (out,) if isinstance(out, Tensor) else out):
            if number:
                playing.put(number, x)

    def write(self, written: Written) -> None:
        written.other(self)


@dataclass(frozen=True, eq=False)
class Tape:
    """The work of one step of a call.

    `end` is the first number beyond its tensors; `room` are those allocated (number, shape, strides, dtype), bytes
    holding many parts; `dead` are those nobody needs after it; `returned` is its result; `device` is the kind of device
    they are on.
    """

    end: int
    room: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    work: tuple[TapedLaunch | TapedInterpretedLaunch | TapedOrder | TapedOperation, ...]
    dead: tuple[int, ...]
    returned: tuple[int, ...]
    device: str

    def play(self, playing: Playback) -> list[Tensor | None]:
        """Do it on what `playing` holds."""
        device, tensors, bases = playing.device, playing.tensors, playing.bases
        if device is not None:
            if device != torch._C._cuda_getDevice():  # the public way takes the host longer
                with torch.cuda.device(device):
                    return self.play(playing)
            playing.stream = current_stream(device)
        new = self.end - len(tensors)
        tensors.extend([None] * new)
        bases.extend([0] * new)
        if watched():
            self._step_by_step(playing)
        else:
            self._written(playing)
        out = [tensors[number] for number in self.returned]
        for number in self.dead:
            tensors[number] = None
        return out

    @cached_property
    def _written(self) -> Callable[[Playback], None]:
        """Its allocations and work as one function, once it is played."""
        return function_of(self.room, self.work, self.device)

    def _step_by_step(self, playing: Playback) -> None:
        """The same, one launch after the other by `CompiledKernel.start`, which tells profilers."""
        for number, shape, strides, dtype in self.room:
            playing.put(number, playing.like.new_empty_strided(shape, strides, dtype=dtype))
        for one in self.work:
            one.play(playing)


class StepRecord:
    """What is known of a step: its tape, once written; whether it was seen before; whether it cannot be written."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.seen = self.refused = False


def _filled(x: Any, playing: Playback) -> Any:
    if isinstance(x, TapedDescriptor):
        return TensorDescriptor(_filled(x.base, playing), x.shape, x.strides, x.block)
    if isinstance(x, TensorRef):
        return playing.tensors[x.number]
    if isinstance(x, BufferPart):
        return playing.at(x)
    return type(x)(_filled(y, playing) for y in x) if isinstance(x, (tuple, list)) else x
