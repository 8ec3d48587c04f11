"""One process group as ring_la uses it: few calls, group ranks, and errors that name the peer.

Every call returns a `Pending` whose ``wait()`` gives the result; on CUDA waiting orders the current stream
after the message and never blocks the host. A group of one rank sends nothing.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, DisagreementError, PeerError, UnsupportedError
from . import sharing
from .agreement import Agreement
from .lookout import device_busy, look_out
from .members import JobStore, Members
from .memory import GroupMemory, TakenInTurns
from .pending import Pending
from .streams import MessageStreams
from .symmetric import SymmetricTransport
from .transport import TorchTransport, Transport, Waitable
from .watch import PeerWatch

TRANSPORTS = ("auto", "torch", "symmetric")


class Group(Members):
    """A process group, its messages, and by name what else its ranks share.

    Args:
        group: a ProcessGroup; None for the default group.
        timeout: how long a peer may take before a wait becomes a `PeerError`.
        transport: what carries the messages: "torch" (the group's backend, NCCL or gloo), "symmetric" (peer-to-peer
            memory of the GPUs of one host), or "auto", the group's backend, with mailboxes beside it where GPUs reach
            each other. Collective.

    Attributes:
        agreement: compares what ranks must agree on. watch: names the peer behind a failure.
        streams: on which stream messages run. memory: memory of all ranks for large tensors.
        turns: the same twice, for uses that follow each other without a barrier.
        transport: the `Transport` in use.
        mailboxes: memory that kernels reach each other through, for those that send by themselves; None: none.
        name: a number that no other group has, the same on all its ranks.
        copies: whether large tensors may be copied from and to other ranks' memory ("auto": if the driver lets them).
        bytes_sent: payload bytes this rank has sent, for tests and benchmarks.
        wait_seconds: host time spent waiting, for messages (on CPU, where that blocks) and ends of captured steps.
        waits_since: when the wait that the host is in began (`time.monotonic`); None: it is in none.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta, transport: str = "auto") -> None:
        super().__init__(group, timeout)
        self.refuse_spoiled()
        by_torch = TorchTransport(self)
        self.store = JobStore(_shared_number(self, by_torch))
        self.name = self.store.name
        self.watch = PeerWatch(self, self.store)
        self.agreement = Agreement(self, self.store, self.watch)
        self.streams = MessageStreams(self)
        if self.on_cuda and self.agreement.calls is not None:
            busy = functools.partial(device_busy, self.device, self.streams.side)
            look_out(self.agreement.calls, self.group.abort, busy)
        self.memory = GroupMemory(self, self.watch)
        self.turns = TakenInTurns(lambda: GroupMemory(self, self.watch))
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        self.waits_since: float | None = None
        self.transport: Transport = by_torch
        self.mailboxes: SymmetricTransport | None = None
        self.copies = transport == "symmetric" and self.size > 1
        if transport == "symmetric":
            self._carry_by_mailboxes(by_torch)
        elif transport == "auto" and self.on_cuda:
            self.copies = sharing.can_copy(self, self.agreement)
            if self.copies:
                with suppress(UnsupportedError):  # on every rank or on none
                    self.mailboxes = SymmetricTransport.open(self, self.streams, self.agreement, by_torch)

    def _carry_by_mailboxes(self, by_torch: TorchTransport) -> None:
        why = sharing.unsupported(self, self.agreement)
        if why:
            raise UnsupportedError("transport", "'auto' or 'torch' for this group", f"'symmetric': {why}")
        if self.size > 1:
            self.mailboxes = SymmetricTransport.open(self, self.streams, self.agreement, by_torch)
            self.transport = self.mailboxes

    # -- messages ------------------------------------------------------------------------------------------

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.size == 1 or (self.agreement.calls is not None and self.agreement.calls.one_host)

    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x` to group rank `to`."""
        pending = self.exchange({to: x}, {})
        return Pending(lambda: (pending.wait(), x)[1])

    def recv(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Pending:
        """Receive a tensor from group rank `source`; the result is the tensor."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        pending = self.exchange({}, {source: out})
        return Pending(lambda: (pending.wait(), out)[1])

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], small: bool = False) -> Pending:
        """Send one tensor to each rank of `sends` and fill the (contiguous) tensors of `receives`, at once.

        `small`, on all ranks or none: through mailboxes where there are some, which takes the host less.
        """
        by = self.mailboxes if small and self.mailboxes is not None else self.transport
        sends = {r: t.contiguous() for r, t in sends.items()}
        self.bytes_sent += sum(t.nbytes for t in sends.values())
        what = f"exchanging with ranks {sorted({*sends, *receives})}"
        return self._pending(what, lambda: by.exchange(sends, receives), lambda: (receives, sends)[0])

    def refuse_late(self, what: str) -> None:
        """Raise a `PeerError` before `what` if a peer is known to have been late, a `DisagreementError` if one was in
        another call, or the error for which messages were given up; waits for nothing."""
        if self.agreement.calls is not None and self.agreement.calls.trouble is not None:
            raise self.agreement.calls.trouble
        by = self.transport if self.mailboxes is None else self.mailboxes
        late = by.late()
        if late and isinstance(by, SymmetricTransport) and (elsewhere := by.elsewhere()):
            raise DisagreementError(
                f"the ranks of this group disagree on which call this is: rank {self.rank} got a message of another one"
                f" from {self.names(elsewhere)}\nIts numbers are NaN here; a replayed graph sends as it was captured"
            )
        self.watch.refuse_late(what, late)

    def died(self) -> PeerError | None:
        """What to raise where the host waits for its GPU, and a rank of its host has died; None: nobody has."""
        return None if self.agreement.calls is None else self.agreement.calls.died()

    def give_up(self, error: PeerError) -> None:
        """Messages under way will not come, for an error that every later call raises. Waits for nothing: NCCL's abort
        ends when no graph holds its messages, and whoever holds one is to learn of the error first."""
        if self.agreement.calls is not None:
            self.agreement.calls.give_up(error)
        if self.on_cuda:
            threading.Thread(target=self.group.abort, name="ring_la abort", daemon=True).start()

    def put_by_kernel(self, size: int) -> None:
        """Count `size` bytes that a kernel of the caller puts by itself; raises if a peer has been late before."""
        self.refuse_late("sending")
        self.bytes_sent += size

    def all_gather(self, x: Tensor) -> Pending:
        """Every rank's `x`, stacked: ``[P, *x.shape]``."""
        if self.size == 1:
            return Pending(lambda: x[None])
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        self.bytes_sent += x.nbytes * (self.size - 1)
        return self._pending("gathering", lambda: self.transport.all_gather(out, x), lambda: (out, x)[0])

    def all_to_all(self, x: Tensor) -> Pending:
        """Row r of ``x [P, …]`` goes to rank r; row r of the result came from rank r."""
        if self.size == 1:
            return Pending(lambda: x)
        x = x.contiguous()
        out = torch.empty_like(x)
        self.bytes_sent += x.nbytes // self.size * (self.size - 1)
        return self._pending("exchanging all to all", lambda: self.transport.all_to_all(out, x), lambda: (out, x)[0])

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Rows of `x` in blocks of `send[r]` rows to rank r; blocks of `receive[r]` rows come back."""
        if self.size == 1:
            return Pending(lambda: x)
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        row = x.nbytes // max(1, x.shape[0])
        self.bytes_sent += row * (sum(send) - send[self.rank])
        post = lambda: self.transport.all_to_all_uneven(out, x, send, receive)  # noqa: E731
        return self._pending("exchanging all to all", post, lambda: (out, x)[0])

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """The reduction of every rank's `x` (by default its sum), in a new tensor."""
        out = x.clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return Pending(lambda: out)
        self.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size
        return self._pending("reducing over all ranks", lambda: self.transport.all_reduce(out, op), lambda: out)

    # -- waiting and failing -------------------------------------------------------------------------------

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The host waits for something that other ranks have a part in."""
        self.waits_since = start = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None
            self.wait_seconds += time.monotonic() - start

    def _pending(self, what: str, post: Callable[[], Sequence[Waitable]], result: Callable[[], Any]) -> Pending:
        """Post a message; a peer that is already gone shows here, one that dies later in ``wait()``."""
        self.refuse_forked()
        self.refuse_late(what)
        calls = None if self.on_cuda else self.agreement.calls
        try:
            if calls is not None and not calls.one_host:  # a message of another size would end gloo's process
                calls.meet()
            posted = post()
        except (DisagreementError, ArgumentError):
            raise
        except ValueError as error:  # PyTorch's, of a group that it knows no more
            raise ArgumentError("group", "a process group that is there", "one that was destroyed") from error
        except RuntimeError as error:
            raise self.watch.error(what, error) from error

        def finish() -> Any:
            with self.waiting():
                try:
                    if posted and calls is not None:
                        calls.meet(sent=True)
                    for one in posted:
                        one.wait()
                except DisagreementError:
                    raise
                except RuntimeError as error:
                    raise self.watch.error(what, error) from error
            return result()

        return Pending(finish)


def _shared_number(members: Members, transport: Transport) -> int:
    """A number all ranks of this group share and no other group has, for keys in the job's store. Collective."""
    mine = torch.tensor([uuid.uuid4().int >> 66], device=members.device)
    if members.size == 1:
        return int(mine)
    out = mine.new_empty(members.size, 1)
    try:
        for one in transport.all_gather(out, mine):
            one.wait()
    except RuntimeError as error:
        who = f"rank {members.rank} of {members.size} waited for others to make this group"
        raise PeerError(f"{who}, as all ranks do at the same time. Cause: {str(error).splitlines()[0]}") from error
    return int(out[0])
