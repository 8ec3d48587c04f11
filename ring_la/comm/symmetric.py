"""Messages by peer-to-peer memory: CUDA symmetric memory on the GPUs of one host, one kernel a call.

`SymmetricTransport` sends through mailboxes (see `copy_kernel`): one small kernel on the group's side stream puts what
this rank sends and takes what it receives, with no work of the host in between, in a CUDA graph too. Messages it does
not carry (sizes that are no multiple of 16 bytes, very large ones, reductions other than a small sum) go by the process
group's own backend; every rank decides that from the size alone. NVLink multicast is never used.

A peer that dies or stalls: after the group's timeout its messages arrive as NaN, and the next call on the group raises
a `PeerError` that names it. The group is then of no more use.
"""

from __future__ import annotations

import base64
import inspect
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ..errors import UnsupportedError
from .transport import TorchTransport, Work

if TYPE_CHECKING:
    from ..kernels.runtime.compiled import Compiled
    from .group import Group

UNIT = 16
"""Messages are multiples of this many bytes."""
MOST = 256 << 20
"""Bytes of the largest message put by the kernel; beyond, NCCL's bandwidth counts and not its latency."""
MOST_SUMMED = 8 << 20
"""Bytes of the largest sum made of everybody's values."""


def memory(group: Group, size: int) -> Any:
    """A symmetric memory handle of at least `size` bytes on every rank, kept with `group`. Collective when it must
    grow, so every rank asks for the same sizes in the same order."""
    kept = group.__dict__.setdefault("_symmetric", {})
    size = max(1 << 20, 1 << (size - 1).bit_length())
    if size not in kept:
        kept[size] = allocate(group, size)
    return kept[size][1]


def allocate(group: Group, size: int) -> tuple[Tensor, Any]:
    """`size` zero bytes of torch's symmetric memory on every rank: this rank's, and the handle. Collective; every rank
    must have taken part in as many rendezvous of torch before, in whatever groups."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=group.device)
    own.zero_()
    torch.cuda.synchronize(group.device)  # before any rank may write into it
    return own, symmetric.rendezvous(own, group.group.group_name)


def share(group: Group, own: Tensor) -> list[Tensor]:
    """Every rank's tensor `own`, its memory mapped here by CUDA's interprocess handles. Collective; one host.

    Not torch's rendezvous: that makes multicast objects where it can, and hangs in groups whose ranks have been in
    different numbers of rendezvous before.
    """
    torch.cuda.synchronize(group.device)  # what is in it now is seen by all
    names, arguments, failure = list(inspect.signature(rebuild_cuda_tensor).parameters), (), ""
    try:
        _, arguments = reduce_tensor(own)
    except RuntimeError as error:  # memory of an allocator that gives no handles
        failure = f"rank {group.rank} cannot share its memory: {str(error).splitlines()[0]}"
    told = group.tell(base64.b64encode(pickle.dumps(arguments)).decode())
    mapped = []
    for rank, text in enumerate(told):
        if rank == group.rank:
            mapped.append(own)
            continue
        theirs = dict(zip(names, pickle.loads(base64.b64decode(text))))
        if failure or not theirs:
            break
        theirs |= {"storage_device": group.device.index, "event_sync_required": False}
        try:
            mapped.append(rebuild_cuda_tensor(**theirs))
        except RuntimeError as error:
            failure = f"rank {group.rank} cannot map the memory of rank {rank}: {str(error).splitlines()[0]}"
            break
    failures = [f for f in group.tell(failure) if f]
    if failures:
        raise UnsupportedError("transport", "'auto' or 'torch' for this group", f"'symmetric': {failures[0]}")
    return mapped


def refusal(group: Group) -> str:
    """Why this group cannot use symmetric memory; empty if it can. Collective."""
    if not group.on_cuda:
        return "the group's backend is not NCCL"
    here = socket.gethostname() if find_spec("triton") else "no triton"
    everywhere = group.tell(here)
    if "no triton" in everywhere:
        return f"triton is not installed on rank {everywhere.index('no triton')}"
    if len(set(everywhere)) > 1:
        return f"the ranks are on {len(set(everywhere))} hosts"
    return ""


def copies(group: Group) -> bool:
    """Whether every rank can copy from every other's memory, as far as the driver says. Collective.

    It says so of GPUs that this process sees; where each process sees its own alone, the answer is no.
    """
    if group.size == 1 or refusal(group):
        return False
    devices = [int(d) for d in group.tell(str(group.device.index))]
    here, seen = group.device.index, torch.cuda.device_count()
    others = [d for r, d in enumerate(devices) if r != group.rank]
    mine = all(d < seen and d != here and torch.cuda.can_device_access_peer(here, d) for d in others)
    return all(answer == "yes" for answer in group.tell("yes" if mine else "no"))


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

    count: int
    room: int
    skip: int


class SymmetricTransport:
    """Mailboxes in the memory of every rank of a group.

    Args:
        group: the group. torch: what carries the rest.
        own: this rank's mailboxes, int32. mailboxes: address of every rank's, seen from here (`open` makes them).
        keep: what owns that memory.

    Attributes:
        own, mailboxes, broken, report, constants: as `copy_kernel.exchange_kernel` takes them. patience: nanoseconds.
        lanes: those for the states of a ring, of elementwise and of dense maps (`Lanes`).
    """

    name = "symmetric"

    def __init__(
        self,
        group: Group,
        torch_transport: TorchTransport,
        own: Tensor,
        mailboxes: Sequence[int],
        keep: object,
        **constants: int,
    ) -> None:
        from . import copy_kernel as kernel

        self.group, self.torch, self.own, self._keep = group, torch_transport, own, keep
        device = group.device
        away = [(address - own.data_ptr()) // UNIT for address in mailboxes]
        self.mailboxes = torch.tensor(away, dtype=torch.int64, device=device)
        self.broken = torch.zeros(group.size, dtype=torch.int32, device=device)
        self.report = torch.zeros(group.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._kernel = kernel.exchange_kernel
        self.constants = dict(
            P=group.size, BLOCKS=kernel.BLOCKS, SLOTS=kernel.SLOTS, CHUNK=kernel.CHUNK, FLAG=kernel.FLAG, STEP=4096,
            CLOCK=device.type == "cuda",
        ) | constants  # fmt: skip
        self.lanes = self._lanes(kernel.LANES)
        self._addresses = [x.data_ptr() for x in (own, self.mailboxes, self.broken, self.report)]
        self._compiled: Compiled | None = None  # the kernel, once it ran: nothing it is specialised on changes
        self._aside = False  # whether messages may be under way on the side stream
        self.patience = int(group.timeout.total_seconds() * 1e9)

    def _lanes(self, sizes: Sequence[tuple[int, int]]) -> tuple[Lanes, ...]:
        c, out = self.constants, []
        skip = c["P"] * c["BLOCKS"] * c["SLOTS"] * (c["FLAG"] + c["CHUNK"])
        for count, room in sizes:
            out.append(Lanes(count, room, skip))
            skip += c["P"] * count * (c["FLAG"] + room)
        return tuple(out)

    @classmethod
    def open(cls, group: Group, torch_transport: TorchTransport) -> SymmetricTransport:
        """The transport of a group that has no `refusal`. Collective."""
        from . import copy_kernel as kernel

        own = torch.empty(kernel.words(group.size), dtype=torch.int32, device=group.device)
        kernel.prepare(own, group.size)
        mapped = share(group, own)
        return cls(group, torch_transport, own, [x.data_ptr() for x in mapped], mapped)

    def late(self) -> list[int]:
        """Ranks that have let a message of ours run into the timeout so far; read without synchronisation."""
        return [r for r, late in enumerate(self.report.tolist()) if late]

    # -- messages ------------------------------------------------------------------------------------------

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Work]:
        sizes = sorted({t.nbytes for t in (*sends.values(), *receives.values())})
        works: list[Work] = []
        others = ({}, {})
        for size in sizes:
            out = {r: t for r, t in sends.items() if t.nbytes == size}
            into = {r: t for r, t in receives.items() if t.nbytes == size}
            if not carried(size):
                others[0].update(out)
                others[1].update(into)
            else:
                works.append(self._exchange(out, into, size))
        return works + (self.torch.exchange(*others) if any(others) else [])

    def all_gather(self, out: Tensor, x: Tensor) -> list[Work]:
        if not carried(x.nbytes):
            return self.torch.all_gather(out, x)
        everyone = (1 << self.group.size) - 1
        return [self._beside(Message(x, out, x.nbytes, (0, x.nbytes), everyone, everyone))]

    def all_to_all(self, out: Tensor, x: Tensor) -> list[Work]:
        size = x.nbytes // self.group.size
        if not carried(size):
            return self.torch.all_to_all(out, x)
        everyone = (1 << self.group.size) - 1
        return [self._beside(Message(x, out, size, (size, size), everyone, everyone))]

    def all_to_all_uneven(self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Work]:
        return self.torch.all_to_all_uneven(out, x, send, receive)

    def all_reduce(self, out: Tensor, op: dist.ReduceOp.RedOpType) -> list[Work]:
        if not carried(out.nbytes) or out.nbytes > MOST_SUMMED or op != dist.ReduceOp.SUM:
            return self.torch.all_reduce(out, op)
        everyone = (1 << self.group.size) - 1
        rows = out.new_empty(self.group.size, *out.shape)
        message = Message(out, rows, out.nbytes, (0, out.nbytes), everyone, everyone)
        return [self._beside(message, lambda: torch.sum(rows, 0, dtype=out.dtype, out=out))]

    # -- the kernel ----------------------------------------------------------------------------------------

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], size: int) -> Work:
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
            target = rows = torch.empty(len(receives), size, dtype=torch.uint8, device=self.group.device)
            receive_stride = size

            def take() -> None:
                for row, r in zip(rows, sorted(receives)):
                    receives[r].copy_(row.view(receives[r].dtype).view(receives[r].shape))

        masks = [sum([1 << r for r in ranks]) for ranks in (sends, receives)]
        return self._beside(Message(source, target, size, (send_stride, receive_stride), *masks), take)

    def _launch(self, m: Message, stream: int) -> None:
        """Send and receive on a CUDA stream, which must be the current one unless the kernel is `_ready`."""
        c = self.constants
        blocks = min(c["BLOCKS"], -(-m.size // (4 * c["CHUNK"])))
        grid = 2 * c["P"] * blocks, 1, 1
        units = m.size // UNIT, m.apart[0] // UNIT, m.apart[1] // UNIT
        rest = self.group.rank, *units, m.sends, m.receives, self.patience
        if self._ready(m):
            self._compiled(grid, stream, (m.source.data_ptr(), m.target.data_ptr(), *self._addresses, *rest))
            return
        own = self.own, self.mailboxes, self.broken, self.report
        compiled = self._kernel[grid](_words(m.source), _words(m.target), *own, *rest, **c, num_warps=4)
        if compiled is not None and max(m.apart) < UNIT << 31:  # the interpreter compiles nothing
            from ..kernels.runtime.compiled import Compiled

            self._compiled = Compiled(compiled, c.values())

    def _ready(self, m: Message) -> bool:
        """Whether the kernel is compiled for a message: its sizes are 32-bit integers."""
        return self._compiled is not None and max(m.apart) < UNIT << 31

    def order(self) -> None:
        """Before a kernel that uses the mailboxes from the current stream: it stands behind the other stream's."""
        side = self.group.side_stream
        if side is None:
            return
        current = torch.cuda.current_stream(self.group.device)
        if current == side:
            self._aside = True
        elif self._aside:
            self._aside = False
            _join(current, side)

    def _beside(self, message: Message, after: Callable[[], object] | None = None) -> Work:
        """Send on the side stream after what the current one has so far, or in the current stream's order; `after` is
        what is queued behind it."""
        if message.source.data_ptr() % UNIT:
            message = message._replace(source=message.source.clone())
        side = self.group.side_stream
        if side is None:
            self._launch(message, 0)
            if after is not None:
                after()
            return Done()
        current = torch.cuda.current_stream(self.group.device)
        if self.group.beside is None or current == side:
            self.order()
            self._launch(message, current.cuda_stream)
            if after is not None:
                after()
            return Done()
        self._aside = True
        side.wait_stream(current)
        if after is None and self._ready(message):
            self._launch(message, side.cuda_stream)
        else:
            with torch.cuda.stream(side):
                self._launch(message, side.cuda_stream)
                if after is not None:
                    after()
        return Beside(side.record_event(), (message, after))


def _join(current: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    """Messages of both streams pass through the same mailboxes: have `current` wait for those aside. A capture waits
    only for what it has captured; what ran before it is over."""
    capturing = torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(side):
        same = torch.cuda.is_current_stream_capturing() == capturing
    if same:
        current.wait_stream(side)


class Done:
    """A message that stands in the current stream's own order."""

    def wait(self) -> None:
        pass


class Beside:
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
    """The memory at `x` as 32-bit words."""
    return x.reshape(-1).view(torch.uint8)[: x.nbytes // 4 * 4].view(torch.int32)
