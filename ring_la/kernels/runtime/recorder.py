"""What watches the steps of a call and makes a `Tape` of each.

A dispatch mode sees torch's operations, and `launch` tells of kernels. Memory is laid out by when it was needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ring_la.kernels.runtime.observer import observing
from ring_la.kernels.runtime.tape import (
    BufferPart,
    Tape,
    TapedDescriptor,
    TapedInterpretedLaunch,
    TapedLaunch,
    TapedOperation,
    TapedOrder,
    TensorRef,
)
from ring_la.kernels.runtime.triton_version import CompiledKernel, InterpretedKernel, TensorDescriptor

BOUNDARY = 256
"""Bytes every part of an allocation is aligned to."""

aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default,
)  # fmt: skip


@dataclass
class _Allocated:
    """A tensor a step allocated: when, in events, and until when its memory was needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: StorageWeakRef
    born: int
    died: int | None = None

    @property
    def size(self) -> int:
        bytes_ = self.dtype.itemsize * math.prod(self.shape)
        return max(1, -(-bytes_ // BOUNDARY)) * BOUNDARY


class _Allocation(NamedTuple):
    """A tensor came to be, without a value."""


class _Operation(NamedTuple):
    """torch did something; `numbers` are those of what it made, 0 for what was there before."""

    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    numbers: tuple[int, ...]

    def wanted(self, needed: set[int]) -> bool:
        """Whether it does more than to make a view nobody needs."""
        views = all(r.alias_info is not None and not r.alias_info.is_write for r in self.function._schema.returns)
        return not views or any(n in needed for n in self.numbers)


class _Launch(NamedTuple):
    """A kernel was launched."""

    how: CompiledKernel | InterpretedKernel
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    stream: torch.cuda.Stream | None


class _Order(NamedTuple):
    """Streams were put in order."""

    step: Callable[[], None]


class _Numbers(NamedTuple):
    """Tensors of a step by number: what it returns, what operations read, and what is still there."""

    returned: tuple[int, ...]
    used: set[int]
    alive: set[int]


class Recorder(TorchDispatchMode):
    """Watches the steps of one call (``with recorder: …``) and makes a tape of each."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._next = 1
        self._parts: dict[int, BufferPart] = {}  # parts of earlier steps' buffers
        self._events: list[_Allocation | _Operation | _Launch | _Order] = []
        self._allocated: dict[int, _Allocated] = {}
        self._refused = False
        self._lasting: dict[int, Tensor] = {}
        self._device = "cpu"

    def __enter__(self) -> Recorder:
        self._token = observing.set(self)  # type: ignore[arg-type]
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        observing.reset(self._token)

    def bring(self, x: Tensor) -> int:
        """A tensor of the caller; the numbers are those `Playback.bring` gives."""
        self._device = x.device.type
        return self._number(x)

    def outlived(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that are there as long as the tape is, at one address."""
        self._lasting |= {id(x): x for x in tensors}

    # -- what happens ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._look()
        known = tuple(self._referred(x) for x in args)
        out = function(*args, **kwargs)
        if any(isinstance(x, Tensor) for x in kwargs.values()):
            self._refused = True
        made = (out,) if isinstance(out, Tensor) else out
        if not isinstance(made, (tuple, list)) or not all(isinstance(x, Tensor) for x in made):
            self._refused = True
        elif function in EMPTY and out.is_contiguous():
            self._allocated[self._number(out)] = _Allocated(
                tuple(out.shape), out.dtype, StorageWeakRef(out.untyped_storage()), len(self._events)
            )
            self._events.append(_Allocation())
        else:
            numbers = tuple(0 if x in self._numbers else self._number(x) for x in made)
            self._events.append(_Operation(function, known, kwargs, numbers))
        return out

    def launched(
        self,
        how: CompiledKernel | InterpretedKernel,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._look()
        if any(isinstance(x, tuple) for x in args):
            self._refused = True  # a frame has no place for tensors in tuples
        self._events.append(_Launch(how, grid, tuple(self._referred(x) for x in args), stream))

    def ordered(self, step: Callable[[], None]) -> None:
        self._look()
        self._events.append(_Order(step))

    def _number(self, x: Tensor) -> int:
        self._numbers[x] = number = self._next
        self._next += 1
        return number

    def _referred(self, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(self._referred(y) for y in x)
        if isinstance(x, TensorDescriptor):
            return TapedDescriptor(self._referred(x.base), x.shape, x.strides, x.block_shape)
        if not isinstance(x, Tensor) or id(x) in self._lasting:
            return x
        if x not in self._numbers:
            self._refused = True  # memory this call does not own, and its caller did not bring
            return None
        return TensorRef(self._numbers[x])

    def _look(self) -> None:
        """Whose memory is no longer needed."""
        for one in self._allocated.values():
            if one.died is None and one.storage.expired():
                one.died = len(self._events)

    # -- a step's end ----------------------------------------------------------------------------------------

    def finish(
        self, returned: Sequence[Tensor | None], kept: Sequence[Tensor | None] = (), last: bool = False
    ) -> Tape | None:
        """The tape of the step that ends here with `returned`. None: it did something that cannot be repeated so.

        `kept` must be tensors of their own, as the results are: so are all that are still there, but after the `last`
        step, when no later one returns them.
        """
        self._look()
        events, self._events = self._events, []
        allocated, self._allocated = self._allocated, {}
        numbers = tuple(0 if x is None else self._numbers.get(x, -1) for x in returned)
        if -1 in numbers or any(n in self._parts for n in numbers):
            self._refused = True
        if self._refused:
            return None
        operations = [e for e in events if isinstance(e, _Operation)]
        used = {r.number for e in operations for r in _refs(e.args)}
        storages = {StorageWeakRef(x.untyped_storage()).cdata for x in (*returned, *kept) if x is not None}
        whole = {
            n for n, a in allocated.items()
            if n in used or a.storage.cdata in storages or (a.died is None and not last)
        }  # fmt: skip
        parts = {n: a for n, a in allocated.items() if n not in whole}
        brief = {n: a for n, a in parts.items() if a.died is not None}
        if len(brief) < len(parts):  # after the last step, when all goes soon: one allocation
            brief = {}
        scratch = self._buffer(brief, len(events))
        lasting = self._buffer({n: a for n, a in parts.items() if n not in brief}, len(events))
        alive = set(self._numbers.values())
        work = self._work(events, _Numbers(numbers, used, alive))
        made = whole | {n for e in operations for n in e.numbers if n}
        dead = tuple(n for n in made if n not in alive) + tuple(n for n, _ in scratch)
        room = [(n, allocated[n].shape, _strides(allocated[n].shape), allocated[n].dtype) for n in sorted(whole)]
        room += [(n, (size,), (1,), torch.uint8) for n, size in (*scratch, *lasting)]
        return Tape(self._next, tuple(room), work, dead, numbers, self._device)

    def _buffer(self, parts: dict[int, _Allocated], end: int) -> list[tuple[int, int]]:
        """The number and bytes of a buffer that holds these tensors, if there are any."""
        if not parts:
            return []
        offsets, size = layout([(a.size, a.born, end if a.died is None else a.died) for a in parts.values()])
        number, self._next = self._next, self._next + 1
        for (n, a), offset in zip(parts.items(), offsets):
            self._parts[n] = BufferPart(number, offset, a.shape, a.dtype)
        return [(number, size)]

    def _work(self, events: Sequence[Any], known: _Numbers) -> tuple[Any, ...]:
        """What a tape does for these events, without views that nobody needs."""
        launches = [e for e in events if isinstance(e, _Launch)]
        needed = known.alive | set(known.returned) | known.used | {r.number for e in launches for r in _refs(e.args)}
        wanted = (e for e in events if not isinstance(e, _Operation) or e.wanted(needed))
        return tuple(self._taped(e) for e in wanted if not isinstance(e, _Allocation))

    def _taped(
        self, event: _Operation | _Launch | _Order
    ) -> TapedLaunch | TapedInterpretedLaunch | TapedOrder | TapedOperation:
        if isinstance(event, _Order):
            return TapedOrder(event.step)
        if isinstance(event, _Operation):
            args = tuple(self._placed(x) for x in event.args)
            return TapedOperation(event.function, args, event.keywords, event.numbers)
        how, grid, args, stream = event
        if isinstance(how, InterpretedKernel):
            return TapedInterpretedLaunch(how, grid, tuple(self._placed(x) for x in args))
        tiles = {i: x for i, x in enumerate(args) if isinstance(x, TapedDescriptor)}
        bases = [self._base(x.base if isinstance(x, TapedDescriptor) else x) for x in args]
        return TapedLaunch.of(how, grid, bases, tiles, stream)

    def _placed(self, x: Any) -> Any:
        if isinstance(x, TapedDescriptor):
            return replace(x, base=self._placed(x.base))
        if isinstance(x, (tuple, list)) and not isinstance(x, TensorRef):
            return type(x)(self._placed(y) for y in x)
        return self._parts.get(x.number, x) if isinstance(x, TensorRef) else x

    def _base(self, x: Any) -> tuple[int, int | float]:
        if not isinstance(x, TensorRef):
            if isinstance(x, Tensor):
                return 0, x.data_ptr()
            return 0, 0 if x is None else x  # None was a constant to the compiler
        part = self._parts.get(x.number)
        return (x.number, 0) if part is None else (part.buffer, part.offset)


def layout(parts: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets of parts (size, first event, event from which it is not needed) in one buffer, and its size: parts needed
    at once do not overlap. The largest first, each at the first place it fits."""
    placed: list[tuple[int, int, int, int]] = []
    offsets = [0] * len(parts)
    for i in sorted(range(len(parts)), key=lambda i: -parts[i][0]):
        size, born, died = parts[i]
        at = 0
        for start, stop, *life in sorted(placed):
            if life[0] < died and born < life[1] and start < at + size and at < stop:
                at = stop
        offsets[i] = at
        placed.append((at, at + size, born, died))
    return offsets, max((stop for _, stop, *_ in placed), default=0)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod([max(1, n) for n in shape[i + 1 :]]) for i in range(len(shape)))


def _refs(x: Any) -> list[TensorRef]:
    if isinstance(x, TensorRef):
        return [x]
    if isinstance(x, TapedDescriptor):
        return _refs(x.base)
    return [r for y in x for r in _refs(y)] if isinstance(x, (tuple, list)) else []
