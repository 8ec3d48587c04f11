"""Messages by peer-to-peer memory of the GPUs of one host, one kernel a call.

`SymmetricTransport` sends through mailboxes (see `copy_kernel`): one small kernel on the group's side stream puts what
this rank sends and takes what it receives, with no work of the host in between, in a CUDA graph too. Messages it does
not carry (sizes that are no multiple of 16 bytes, very large ones, reductions other than a small sum) go by the process
group's own backend; every rank decides that from the size alone. NVLink multicast is never used.

A peer that dies or stalls: after the group's timeout its messages arrive as NaN, and the next call on the group raises
a `PeerError` that names it. With WORDS, what a peer sends in another call arrives as NaN at once, and the next call
raises a `DisagreementError`. The group is then of no more use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Agreement
from .members import Members
from .sharing import UNIT, share
from .streams import MessageStreams
from .transport import TorchTransport, Waitable

MOST = 256 << 20
"""Bytes of the largest message put by the kernel; beyond, NCCL's bandwidth counts and not its latency."""
MOST_SUMMED = 8 << 20
"""Bytes of the largest sum made of everybody's values."""
WORDS = False
"""Whether messages carry a word of their call, which the GPU that takes them compares; its cost is not measured."""


class Message(NamedTuple):
    """Messages of `size` bytes to and from the ranks whose bits are set in `sends` and `receives`, in `source` and
    `target` so many bytes `apart`."""

    source: Tensor
    target: Tensor
    size: int
    apart: tuple[int, int]
    sends: int
    receives: int


class Lanes(NamedTuple):
    """`count` flags and rooms of so many words for each sender, `skip` words from the start of a rank's mailboxes."""

    count: int  # type: ignore[assignment]
    room: int
    skip: int


class MailboxMemory(NamedTuple):
    """Mailboxes of all ranks, mapped here.

    Attributes:
        own: this rank's, int32. addresses: of every rank's, seen from here. keep: what owns that memory.
    """

    own: Tensor
    addresses: Sequence[int]
    keep: object


class SymmetricTransport:
    """Mailboxes in the memory of every rank of a group.

    Args:
        members: the ranks. streams: on which messages run. torch: what carries the rest.
        memory: the mailboxes (`open` makes them). constants: those of the kernel that are not as usual.

    Attributes:
        own, mailboxes, broken, report, constants: as `copy_kernel.exchange_kernel` takes them. patience: nanoseconds.
        lanes: those for the states of a ring, of elementwise and of dense maps (`Lanes`).
        word: what messages of the current call carry, odd.
    """

    name = "symmetric"

    def __init__(
        self,
        members: Members,
        streams: MessageStreams,
        torch_transport: TorchTransport,
        memory: MailboxMemory,
        **constants: int,
    ) -> None:
        from . import copy_kernel as kernel

        self.members, self.streams, self.torch, self._memory = members, streams, torch_transport, memory
        self.word: Callable[[], int] = lambda: 1
        self.own, device = memory.own, members.device
        away = [(address - self.own.data_ptr()) // UNIT for address in memory.addresses]
        self.mailboxes = torch.tensor(away, dtype=torch.int64, device=device)
        self.broken = torch.zeros(members.size, dtype=torch.int32, device=device)
        self.report = torch.zeros(members.size, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        self.constants = dict(
            P=members.size, BLOCKS=kernel.BLOCKS, SLOTS=kernel.SLOTS, CHUNK=kernel.CHUNK, FLAG=kernel.FLAG, STEP=4096,
            CLOCK=device.type == "cuda",
        ) | constants  # fmt: skip
        self.lanes = self._lanes(kernel.LANES)
        self._aside = False  # whether messages may be under way on the side stream
        self.patience = int(members.timeout.total_seconds() * 1e9)

    def _lanes(self, sizes: Sequence[tuple[int, int]]) -> tuple[Lanes, ...]:
        c, out = self.constants, []
        skip = c["P"] * c["BLOCKS"] * c["SLOTS"] * (c["FLAG"] + c["CHUNK"])
        for count, room in sizes:
            out.append(Lanes(count, room, skip))
            skip += c["P"] * count * (c["FLAG"] + room)
        return tuple(out)

    @classmethod
    def open(
        cls, members: Members, streams: MessageStreams, agreement: Agreement, torch_transport: TorchTransport
    ) -> SymmetricTransport:
        """The transport of a group that can have it (`sharing.unsupported`). Collective."""
        from . import copy_kernel as kernel

        own = torch.empty(kernel.words(members.size), dtype=torch.int32, device=members.device)
        kernel.prepare(own, members.size)
        mapped = share(members, agreement, own)
        memory = MailboxMemory(own, [x.data_ptr() for x in mapped], mapped)
        made = cls(members, streams, torch_transport, memory)
        if WORDS:
            made.word = agreement.word
        return made

    def late(self) -> list[int]:
        """Ranks that have let a message of ours run into the timeout so far, or have sent one of another call
        (`elsewhere`); read without synchronisation."""
        return [r for r, found in enumerate(self.report.tolist()) if found]

    def elsewhere(self) -> list[int]:
        """Ranks that have sent a message of another call so far."""
        return [r for r, found in enumerate(self.report.tolist()) if found == 2]

    # -- messages ------------------------------------------------------------------------------------------

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Waitable]:
        sizes = sorted({t.nbytes for t in (*sends.values(), *receives.values())})
        posted: list[Waitable] = []
        others: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for size in sizes:
            out = {r: t for r, t in sends.items() if t.nbytes == size}
            into = {r: t for r, t in receives.items() if t.nbytes == size}
            if not carried(size):
                others[0].update(out)
                others[1].update(into)
            else:
                posted.append(self._exchange(out, into, size))
        return posted + (self.torch.exchange(*others) if any(others) else [])

    def all_gather(self, out: Tensor, x: Tensor) -> list[Waitable]:
        if not carried(x.nbytes):
            return self.torch.all_gather(out, x)
        everyone = (1 << self.members.size) - 1
        return [self._beside(Message(x, out, x.nbytes, (0, x.nbytes), everyone, everyone))]

    def all_to_all(self, out: Tensor, x: Tensor) -> list[Waitable]:
        size = x.nbytes // self.members.size
        if not carried(size):
            return self.torch.all_to_all(out, x)
        everyone = (1 << self.members.size) - 1
        return [self._beside(Message(x, out, size, (size, size), everyone, everyone))]

    def all_to_all_uneven(self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Waitable]:
        return self.torch.all_to_all_uneven(out, x, send, receive)

    def all_reduce(self, out: Tensor, op: dist.ReduceOp.RedOpType) -> list[Waitable]:
        if not carried(out.nbytes) or out.nbytes > MOST_SUMMED or op != dist.ReduceOp.SUM:
            return self.torch.all_reduce(out, op)
        everyone = (1 << self.members.size) - 1
        rows = out.new_empty(self.members.size, *out.shape)
        message = Message(out, rows, out.nbytes, (0, out.nbytes), everyone, everyone)
        return [self._beside(message, lambda: torch.sum(rows, 0, dtype=out.dtype, out=out))]

    # -- the kernel ----------------------------------------------------------------------------------------

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], size: int) -> Waitable:
        source, send_stride = _together(sends, size)
        if not sends:
            source = self.broken  # any memory: nothing is read
        elif source is None:
            source, send_stride = torch.stack([sends[r].reshape(-1).view(torch.uint8) for r in sorted(sends)]), size
        target, receive_stride = _together(receives, size)
        take = None
        if not receives:
            target = self.broken
        elif target is None:
            target = rows = torch.empty(len(receives), size, dtype=torch.uint8, device=self.members.device)
            receive_stride = size

            def take() -> None:
                for row, r in zip(rows, sorted(receives)):
                    receives[r].copy_(row.view(receives[r].dtype).view(receives[r].shape))

        masks = [sum([1 << r for r in ranks]) for ranks in (sends, receives)]
        return self._beside(Message(source, target, size, (send_stride, receive_stride), *masks), take)

    def _launch(self, m: Message, stream: torch.cuda.Stream | None) -> None:
        """Send and receive on a CUDA stream; None: the current one."""
        from ..kernels.runtime.launch import launch
        from .copy_kernel import exchange_kernel

        c: dict[str, Any] = self.constants
        blocks = min(c["BLOCKS"], -(-m.size // (4 * c["CHUNK"])))
        units = m.size // UNIT, m.apart[0] // UNIT, m.apart[1] // UNIT
        launch(
            exchange_kernel, (2 * c["P"] * blocks,), _words(m.source), _words(m.target), self.own, self.mailboxes,
            self.broken, self.report, self.members.rank, *units, m.sends, m.receives, self.word(), self.patience, **c,
            num_warps=4, stream=stream,
        )  # fmt: skip

    def order(self) -> None:
        """Before a kernel that uses the mailboxes from the current stream: it stands behind the other stream's."""
        side = self.streams.side
        if side is None:
            return
        current = torch.cuda.current_stream(self.members.device)
        if current == side:
            self._aside = True
        elif self._aside:
            self._aside = False
            _join(current, side)

    def _beside(self, message: Message, after: Callable[[], object] | None = None) -> Waitable:
        """Send on the side stream after what the current one has so far, or in the current stream's order; `after` is
        what is queued behind it."""
        if message.source.data_ptr() % UNIT:
            message = message._replace(source=message.source.clone())
        side, here = self.streams.side, None
        if side is not None:
            here = torch.cuda.current_stream(self.members.device)
        if side is None or self.streams.beside is None or here == side:
            self.order()
            self._launch(message, here)
            if after is not None:
                after()
            return InOrder()
        self._aside = True
        side.wait_stream(here)
        self._launch(message, side)
        if after is not None:
            with torch.cuda.stream(side):
                after()
        return OnSideStream(side.record_event(), (message, after))


def _join(current: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    """Messages of both streams pass through the same mailboxes: have `current` wait for those aside. A capture waits
    only for what it has captured; what ran before it is over."""
    capturing = torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(side):
        same = torch.cuda.is_current_stream_capturing() == capturing
    if same:
        current.wait_stream(side)


class InOrder:
    """A message that stands in the current stream's own order."""

    def wait(self) -> None:
        pass


class OnSideStream:
    """A message under way on the side stream."""

    def __init__(self, there: Any, keep: object) -> None:
        self._there, self._keep = there, keep

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._there)
        self._keep = None


def carried(size: int) -> bool:
    """Whether messages of this many bytes go by the kernel; the same on both ends."""
    return 0 < size <= MOST and size % UNIT == 0


def _together(tensors: dict[int, Tensor], size: int) -> tuple[Tensor | None, int]:
    """The tensors, in the order of their ranks, as a first one and an even stride in bytes; None if they lie apart."""
    if not tensors:
        return None, 0
    first, *rest = (tensors[r] for r in sorted(tensors))
    if first.data_ptr() % UNIT:
        return None, 0
    stride = rest[0].data_ptr() - first.data_ptr() if rest else size
    even = all(t.data_ptr() == first.data_ptr() + (i + 1) * stride for i, t in enumerate(rest))
    return (first, stride) if even and stride >= 0 and stride % UNIT == 0 else (None, 0)


def _words(x: Tensor) -> Tensor:
    """The memory at `x`, a multiple of 4 bytes, as 32-bit words."""
    return x if x.dtype == torch.int32 else x.reshape(-1).view(torch.int32)
