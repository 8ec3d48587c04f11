"""Memory of the GPUs of one host that every rank reaches: for large tensors, moved by copy engines.

Who copies something into another rank's memory says so by a flag behind it, itself a copy; who needs it waits for the
flag by a small kernel on its own stream (see `flag_kernels`). A peer that is late by more than the group's timeout:
what it should have brought is NaN, and the next use of the memory raises a `PeerError` that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .symmetric import UNIT, allocate

if TYPE_CHECKING:
    from .group import Group

SECTOR = 32
"""Bytes a flag takes."""


class Memory:
    """As many bytes on every rank of a group, mapped by all, and a stream for copies beside the current one.

    Args:
        group: the ranks. seen: the memory of every rank as this one sees it, bytes, this rank's own among them.
        keep: what owns that memory.

    Attributes:
        size: bytes for tensors, the same on every rank.
    """

    def __init__(self, group: Group, seen: Sequence[Tensor], keep: object = None) -> None:
        self.group, self._seen, self._keep = group, seen, keep
        self._head = _head(group.size)
        self.size = len(seen[group.rank]) - self._head
        device, cuda = seen[group.rank].device, seen[group.rank].device.type == "cuda"
        self._device = device.index
        self._stream, self._busy = torch.cuda.Stream(device, priority=-1) if cuda else None, False
        self._teller = torch.cuda.Stream(device, priority=-1) if cuda else None
        self._told = False  # whether the stream of flags has anything to join
        self._patience = int(group.timeout.total_seconds() * 1e9)
        self._own = seen[group.rank].view(torch.int32)
        self._away = torch.tensor([(x.data_ptr() - self._own.data_ptr()) // UNIT for x in seen], device=device)
        self._broken = torch.zeros(group.size, dtype=torch.int32, device=device)
        self._report = torch.zeros(group.size, dtype=torch.int32, pin_memory=cuda)
        self._up = torch.ones(1, dtype=torch.int32, device=device)
        mine = slice(group.rank * SECTOR, group.rank * SECTOR + 4)
        self._flags = [x[mine].view(torch.int32) for x in seen]
        self._compiled: dict[str, Any] = {}

    @classmethod
    def open(cls, group: Group, size: int) -> Memory:
        """Memory with `size` bytes for tensors. Collective."""
        total = _head(group.size) + -(-size // UNIT) * UNIT
        own, handle = allocate(group, total)
        return cls(group, [handle.get_buffer(r, (total,), torch.uint8) for r in range(group.size)], (own, handle))

    @classmethod
    def kept(cls, group: Group, size: int) -> Memory:
        """The memory kept with a group, of at least `size` bytes. Collective when it must grow.

        Raises:
            PeerError: a rank was late in an earlier use.
        """
        memory = group.__dict__.get("_memory")
        if memory is not None:
            group.refuse_late("copying keys and values", memory.late())
        if memory is None or memory.size < size:
            if memory is not None:
                torch.cuda.synchronize(group.device)  # nobody copies from the old one any more
            group.__dict__["_memory"] = None
            memory = group.__dict__["_memory"] = cls.open(group, max(1 << 20, size))
        return memory

    @staticmethod
    def release(group: Group) -> None:
        """Give a group's memory back; the next use makes it anew. Every rank calls, and no CUDA graph may use it."""
        if group.__dict__.pop("_memory", None) is not None:
            torch.cuda.synchronize(group.device)

    @staticmethod
    def held(group: Group) -> int:
        """Bytes a group holds so, which PyTorch's allocator does not count."""
        memory = group.__dict__.get("_memory")
        return 0 if memory is None else memory.size

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

    def join(self) -> None:
        """Order the current stream after what the side stream has so far."""
        if self._busy:  # a stream that has done nothing may not join a graph being captured
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            if self._told:
                current.wait_stream(self._teller)
        self._busy = self._told = False

    def tell(self, rank: int) -> None:
        """Say to `rank`, behind what the current stream has copied to it, that it is there.

        On a stream of its own: so small a copy may be a kernel, which waits for room beside a large one, and what is
        still to be copied to others should not.
        """
        if self._stream is None:
            self._flags[rank].copy_(self._up)
            return
        self._teller.wait_event(self._stream.record_event())
        with torch.cuda.stream(self._teller):
            self._flags[rank].copy_(self._up, non_blocking=True)
        self._told = True

    def arrived(self, ranks: int, first: int, size: int) -> None:
        """Have the current stream wait until the ranks whose bits are set have told this one that what they bring is
        there: `size` bytes from byte `first` on, NaN if one of them is late."""
        self._launch("arrived", ranks, (self._head + first) // UNIT, size // UNIT, self._patience)

    def meet(self, first: int = 0, size: int = 0) -> None:
        """All ranks' current streams stand here; where one is late, `size` bytes from byte `first` on are NaN."""
        self._launch("meet", self.group.rank, (self._head + first) // UNIT, size // UNIT, self._patience)

    def _launch(self, name: str, *numbers: int) -> None:
        from . import flag_kernels

        tensors = (self._own, *([self._away] if name == "meet" else []), self._broken, self._report)
        constants = (self.group.size, flag_kernels.FLAG, 1024, self._stream is not None)
        compiled, grid = self._compiled.get(name), (self.group.size, 1, 1)
        if compiled is not None:  # the same kernel whatever the numbers: Triton need not look at them again
            compiled[grid](*tensors, *numbers, *constants)
            return
        kernel = getattr(flag_kernels, name)
        self._compiled[name] = kernel[grid](*tensors, *numbers, *constants, num_warps=4)


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
