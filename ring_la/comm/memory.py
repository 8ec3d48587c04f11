"""Memory of the GPUs of one host that every rank reaches: for large tensors, moved by copy engines."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .symmetric import allocate

if TYPE_CHECKING:
    from .group import Group


class Memory:
    """As many bytes on every rank of a group, mapped by all, and a stream for copies beside the current one.

    Args:
        group: the ranks. size: bytes, the same on every rank.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.group, self.size = group, size
        self._own, self._handle = allocate(group, size)
        self._rooms: dict[tuple, list[Tensor]] = {}
        self._seen = [self._handle.get_buffer(r, (size,), torch.uint8) for r in range(group.size)]
        self._stream, self._busy = torch.cuda.Stream(group.device, priority=-1), False
        self._patience = int(group.timeout.total_seconds() * 1000)

    @classmethod
    def kept(cls, group: Group, size: int) -> Memory:
        """The memory kept with a group, of at least `size` bytes. Collective when it must grow."""
        memory = group.__dict__.get("_memory")
        if memory is None or memory.size < size:
            if memory is not None:
                torch.cuda.synchronize(group.device)  # nobody copies from the old one any more
            group.__dict__["_memory"] = None
            memory = group.__dict__["_memory"] = cls(group, max(1 << 20, size))
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

    def rooms(self, rank: int, first: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
        """Tensors in the memory of a rank from its byte `first` on; views are kept."""
        key = (rank, first, shapes, dtype)
        if key not in self._rooms:
            self._rooms[key] = cut(self._seen[rank], first, shapes, dtype)
        return self._rooms[key]

    def barrier(self) -> None:
        """All ranks' streams stand here, on the device; a rank that does not come is a CUDA error after the timeout."""
        self._handle.barrier(0, self._patience)

    def now(self) -> Any:
        """What the current stream has so far."""
        return torch.cuda.current_stream(self.group.device).record_event()

    def wait(self, point: Any) -> None:
        """Order the current stream after a point of another."""
        torch.cuda.current_stream(self.group.device).wait_event(point)

    def beside(self, after: Any, *read: Tensor) -> Any:
        """A context on the side stream, after a point of the current one; tensors that it reads are kept."""
        self._stream.wait_event(after)
        self._busy = True
        for x in read:
            x.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Order the current stream after what the side stream has so far."""
        if self._busy:  # a stream that has done nothing may not join a graph being captured
            torch.cuda.current_stream(self.group.device).wait_stream(self._stream)
        self._busy = False


def cut(memory: Tensor, first: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors one after the other in bytes of memory from `first` on."""
    out = []
    for shape in shapes:
        size = prod(shape) * dtype.itemsize
        out.append(memory[first : first + size].view(dtype).view(shape))
        first += size
    return out
