"""What carries messages: torch.distributed's own backends here, peer-to-peer memory in `symmetric`.

A transport fills tensors it is given and returns what to wait for. `Group` is its only caller: it makes the tensors,
counts bytes and turns failures into errors that name the peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .members import Members

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on

MOVED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
"""What NCCL and gloo move as it is; all else travels as bytes."""


class Waitable(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when the message is there; on CUDA, order the current stream after it."""
        ...


class Transport(Protocol):
    """Messages among the ranks of one group, all contiguous. Every rank makes the same calls in the same order."""

    name: str

    def late(self) -> list[int]:
        """Ranks known to have let a message run into the timeout, where waiting does not say so."""
        ...

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Waitable]:
        """Send one tensor to each rank of `sends`, fill those of `receives`."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> list[Waitable]:
        """Fill row r of `out` with rank r's `x`."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor) -> list[Waitable]:
        """Send row r of `x` to rank r; row r of `out` comes from there."""
        ...

    def all_to_all_uneven(self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Waitable]:
        """The same with blocks of `send[r]` and `receive[r]` rows."""
        ...

    def all_reduce(self, out: Tensor, op: dist.ReduceOp.RedOpType) -> list[Waitable]:
        """Replace `out` by its reduction over the ranks."""
        ...


class TorchTransport:
    """The process group's own backend: NCCL or gloo."""

    name = "torch"

    def __init__(self, members: Members) -> None:
        self._members, self.ranks = members, members.global_ranks
        self.timeout = None if members.on_cuda else members.timeout

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which only `Members` holds."""
        return self._members.group

    def late(self) -> list[int]:
        return []

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Waitable]:
        """NCCL takes one message, too, as a batch: on the group's own communicator, opened when it was made."""
        ops = [dist.P2POp(dist.irecv, self._moved(t), self.ranks[r], self.group) for r, t in sorted(receives.items())]
        ops += [dist.P2POp(dist.isend, self._moved(t), self.ranks[r], self.group) for r, t in sorted(sends.items())]
        return self._posted(*dist.batch_isend_irecv(ops)) if ops else []

    def all_gather(self, out: Tensor, x: Tensor) -> list[Waitable]:
        out, x = self._moved(out).view(-1), self._moved(x).view(-1)
        return self._posted(_all_gather(out, x, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor) -> list[Waitable]:
        out, x = self._moved(out).view(-1), self._moved(x).view(-1)
        return self._posted(dist.all_to_all_single(out, x, group=self.group, async_op=True))

    def all_to_all_uneven(self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Waitable]:
        sizes = (list(receive), list(send))
        return self._posted(
            dist.all_to_all_single(self._moved(out), self._moved(x), *sizes, group=self.group, async_op=True)
        )

    def all_reduce(self, out: Tensor, op: dist.ReduceOp.RedOpType) -> list[Waitable]:
        return self._posted(dist.all_reduce(out, op=op, group=self.group, async_op=True))

    def _moved(self, x: Tensor) -> Tensor:
        """`x` in a dtype the backend moves."""
        return x if x.dtype in MOVED else x.view(torch.uint8)

    def _posted(self, *works: dist.Work) -> list[Waitable]:
        return [_TorchWaitable(work, self.timeout) for work in works]


class _TorchWaitable:
    def __init__(self, work: dist.Work, timeout: timedelta | None) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        self._work.wait() if self._timeout is None else self._work.wait(self._timeout)
