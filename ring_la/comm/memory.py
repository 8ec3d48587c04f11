"""Memory of the GPUs of one host that every rank reaches: for large tensors, moved by copy engines.

Who copies something into another rank's memory says so by a flag behind it, itself a copy; who needs it waits for the
flag by a small kernel on its own stream (see `flag_kernels`). A peer that is late by more than the group's timeout:
what it should have brought is NaN, and the next use of the memory raises a `PeerError` that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..kept import plain
from .members import Members
from .sharing import UNIT, allocate
from .watch import PeerWatch

SECTOR = 32
"""Bytes a flag takes."""
STEP = 1024
"""Words a kernel makes NaN at a time."""


class Memory:
    """As many bytes on every rank of a group, mapped by all, and a stream for copies beside the current one.

    Args:
        members: the ranks. seen: the memory of every rank as this one sees it, bytes, this rank's own among them.
        keep: what owns that memory.

    Attributes:
        size: bytes for tensors, the same on every rank.
    """

    def __init__(self, members: Members, seen: Sequence[Tensor], keep: object = None) -> None:
        self.members, self._seen, self._keep = members, seen, keep
        self._head = _head(members.size)
        self.size = len(seen[members.rank]) - self._head
        device, cuda = seen[members.rank].device, seen[members.rank].device.type == "cuda"
        self._device = device.index
        self._stream, self._busy = torch.cuda.Stream(device, priority=-1) if cuda else None, False
        self._second, self._beside = torch.cuda.Stream(device) if cuda else None, False
        self._patience = int(members.timeout.total_seconds() * 1e9)
        self._own = seen[members.rank].view(torch.int32)
        self._away = torch.tensor([(x.data_ptr() - self._own.data_ptr()) // UNIT for x in seen], device=device)
        self._broken = torch.zeros(members.size, dtype=torch.int32, device=device)
        self._report = torch.zeros(members.size, dtype=torch.int32, pin_memory=cuda, device="cpu")
        self._up = torch.ones(1, dtype=torch.int32, device=device)
        mine = slice(members.rank * SECTOR, members.rank * SECTOR + 4)
        self._flags = [x[mine].view(torch.int32) for x in seen]

    @classmethod
    def open(cls, members: Members, size: int) -> Memory:
        """Memory with `size` bytes for tensors. Collective."""
        total = _head(members.size) + -(-size // UNIT) * UNIT
        own, handle = allocate(members, total)
        return cls(members, [handle.get_buffer(r, (total,), torch.uint8) for r in range(members.size)], (own, handle))

    def late(self) -> list[int]:
        """Ranks that were late in a use so far; read without synchronisation."""
        return [r for r, late in enumerate(self._report.tolist()) if late]

    def rooms(self, rank: int, first: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
        """Tensors in the memory of a rank from its byte `first` on."""
        return cut(self._seen[rank], self._head + first, shapes, dtype)

    # -- order on the device -------------------------------------------------------------------------------

    def now(self) -> Any:
        """What the current stream has so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def beside(self, after: Any, *read: Tensor) -> AbstractContextManager:
        """A context on the side stream, after a point of the current one; tensors that it reads are kept."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(after)
        self._busy = True
        for x in read:
            x.record_stream(self._stream)
        return self._stream if hasattr(self._stream, "__enter__") else torch.cuda.stream(self._stream)

    def second(self, after: Any) -> AbstractContextManager:
        """A context on a second stream for kernels, after a point of the current one, until `join_second`. What is made
        in it may be read and dropped behind that: the stream goes on after the current one alone."""
        if self._second is None:
            return nullcontext()
        self._second.wait_event(after)
        self._beside = True
        return torch.cuda.stream(self._second)

    def join_second(self) -> None:
        """Order the current stream after the second one."""
        if self._beside:
            torch.cuda.current_stream(self._device).wait_stream(self._second)
        self._beside = False

    def join(self) -> None:
        """Order the current stream after what the side stream has so far."""
        if self._busy:  # a stream that has done nothing may not join a graph being captured
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._busy = False

    def tell(self, rank: int) -> None:
        """Say to `rank`, behind what the current stream has copied to it, that it is there."""
        self._flags[rank].copy_(self._up, non_blocking=True)

    def arrived(self, ranks: int, first: int, size: int) -> None:
        """Have the current stream wait until the ranks whose bits are set have told this one that what they bring is
        there: `size` bytes from byte `first` on, NaN if one of them is late."""
        self._launch("arrived", ranks, (self._head + first) // UNIT, size // UNIT, self._patience)

    def meet(self, first: int = 0, size: int = 0) -> None:
        """All ranks' current streams stand here; where one is late, `size` bytes from byte `first` on are NaN."""
        self._launch("meet", self.members.rank, (self._head + first) // UNIT, size // UNIT, self._patience)

    def _launch(self, name: str, *numbers: int) -> None:
        from ..kernels.runtime.launch import launch
        from . import flag_kernels

        away = [self._away] if name == "meet" else []
        launch(
            getattr(flag_kernels, name), (self.members.size,), self._own, *away, self._broken, self._report, *numbers,
            P=self.members.size, FLAG=flag_kernels.FLAG, STEP=STEP, CLOCK=self._stream is not None, num_warps=4,
        )  # fmt: skip


class GroupMemory:
    """The memory that is kept with a group, if there is any."""

    def __init__(self, members: Members, watch: PeerWatch) -> None:
        self._members, self._watch = members, watch
        self.current: Memory | None = None
        self._in_graphs: list[Memory] = []

    def of(self, size: int) -> Memory:
        """Memory of at least `size` bytes. Collective when it must grow.

        Raises:
            PeerError: a rank was late in an earlier use.
        """
        memory = self.current
        if memory is not None:
            self._watch.refuse_late("copying keys and values", memory.late())
        if memory is None or memory.size < size:
            if memory is not None:
                torch.cuda.synchronize(self._members.device)  # nobody copies from the old one any more
            self.current = None
            memory = self.current = plain(Memory.open)(self._members, max(1 << 20, size))
        if self._capturing() and memory not in self._in_graphs:
            self._in_graphs.append(memory)  # replays reach it by its address
        return memory

    def _capturing(self) -> bool:
        return self._members.on_cuda and torch.cuda.is_current_stream_capturing()

    def release(self) -> None:
        """Give the memory back; the next use makes it anew. Every rank calls, and no CUDA graph may use it."""
        self._in_graphs.clear()
        if self.current is not None:
            self.current = None
            torch.cuda.synchronize(self._members.device)

    @property
    def held(self) -> int:
        """Bytes held so, which PyTorch's allocator does not count."""
        return 0 if self.current is None else self.current.size


class TakenInTurns:
    """Two memories that uses take in turns, without a barrier behind each: what a rank brings into the second says that
    it has read the first. So in every use each rank must bring something to each other.

    Args:
        make: makes the memory that is kept with a group.

    Attributes:
        open: ends a use that has begun and whose end never came (an error in between); None: there is none.
    """

    def __init__(self, make: Callable[[], GroupMemory]) -> None:
        self._both, self._next = (make(), make()), 0
        self.open: Callable[[], None] | None = None

    def of(self, size: int, first: bool) -> Memory:
        """The memory of the next use, of at least `size` bytes. Collective when it must grow. `first`: of some in a
        row, which a CUDA graph may repeat behind others: all ranks' streams meet."""
        if self.open is not None:
            self.open()
        memory = self._both[self._next].of(size)
        self._next = 1 - self._next
        if first:
            memory.meet()
        return memory


@plain
def cut(memory: Tensor, first: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors one after the other in bytes of memory from `first` on."""
    out = []
    for shape in shapes:
        size = prod(shape) * dtype.itemsize
        out.append(memory[first : first + size].view(dtype).view(shape))
        first += size
    return out


def _head(ranks: int) -> int:
    """Bytes before the tensors: two flags a rank, up to where a tensor may begin."""
    return -(-2 * ranks * SECTOR // 256) * 256
