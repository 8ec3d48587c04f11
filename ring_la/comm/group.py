"""One process group as ring_la uses it: few calls, group ranks, and errors that name the peer.

Every call returns a `Pending` whose ``wait()`` gives the result; on CUDA waiting orders the current stream
after the message and never blocks the host. A group of one rank sends nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, DisagreementError, PeerError, UnsupportedError
from .transport import TorchTransport, Transport, Work

if TYPE_CHECKING:
    from .symmetric import SymmetricTransport

TRANSPORTS = ("auto", "torch", "symmetric")


class Pending:
    """An exchange under way. ``wait()`` finishes it once and returns its result."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


class Group:
    """A process group, addressed by group rank.

    Args:
        group: a ProcessGroup; None for the default group.
        timeout: how long a peer may take before a wait becomes a `PeerError`.
        transport: what carries the messages: "torch" (the group's backend, NCCL or gloo), "symmetric" (peer-to-peer
            memory of the GPUs of one host), or "auto", the group's backend, with mailboxes beside it where GPUs reach
            each other. Collective.

    Attributes:
        transport: the `Transport` in use.
        mailboxes: memory that kernels reach each other through, for those that send by themselves; None: none.
        name: a number that no other group has, the same on all its ranks.
        copies: whether large tensors may be copied from and to other ranks' memory ("auto": if the driver lets them).
        bytes_sent: payload bytes this rank has sent, for tests and benchmarks.
        wait_seconds: host time spent waiting for messages (on CPU, where waiting blocks).
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta, transport: str = "auto") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("group", "an initialised torch.distributed (dist.init_process_group)", "none")
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ArgumentError("group", "a group this rank belongs to", f"one without global rank {dist.get_rank()}")
        self.global_ranks = dist.get_process_group_ranks(self.group)
        self.on_cuda = "nccl" in str(dist.get_backend(self.group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
        self.timeout = timeout
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        self.side_stream = torch.cuda.Stream(self.device) if self.on_cuda and self.size > 1 else None
        self._in_order = False
        self._agreements = self._failures = 0
        by_torch = TorchTransport(self.group, self.global_ranks, self.on_cuda, timeout)
        self.transport: Transport = by_torch
        self.mailboxes: SymmetricTransport | None = None
        self.name = self._make_name()
        self.copies = transport == "symmetric" and self.size > 1
        if transport == "symmetric":
            self.transport = self._symmetric(by_torch)
            self.mailboxes = self.transport if self.copies else None
        elif transport == "auto" and self.on_cuda:
            from .symmetric import SymmetricTransport, copies

            self.copies = copies(self)
            if self.copies:
                with suppress(UnsupportedError):  # on every rank or on none
                    self.mailboxes = SymmetricTransport.open(self, by_torch)

    def _symmetric(self, by_torch: TorchTransport) -> Transport:
        from .symmetric import SymmetricTransport, refusal

        why = refusal(self)
        if why:
            raise UnsupportedError("transport", "'auto' or 'torch' for this group", f"'symmetric': {why}")
        return SymmetricTransport.open(self, by_torch) if self.size > 1 else by_torch

    # -- order on the device -------------------------------------------------------------------------------

    @property
    def beside(self) -> torch.cuda.Stream | None:
        """The stream messages run on beside the current one; None: they stand in the current stream's order."""
        return None if self._in_order else self.side_stream

    @contextmanager
    def in_order(self, wanted: bool = True) -> Iterator[None]:
        """What is exchanged here has nothing to run beside: it spares the switch to another stream and back."""
        before, self._in_order = self._in_order, wanted or self._in_order
        try:
            yield
        finally:
            self._in_order = before

    # -- messages ------------------------------------------------------------------------------------------

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

    def sends(self, size: int) -> None:
        """Count `size` bytes that a kernel of the caller puts by itself; raises if a peer has been late before."""
        self.refuse_late("sending", self._late())
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

    def agree(self, what: str, value: object, hint: str = "") -> None:
        """Raise `DisagreementError` on every rank unless all ranks bring an equal `value`.

        Of mappings the error shows the entries that differ; where one is a refusal ("refused: …"), that alone. The
        `hint` follows.
        """
        if self.size == 1:
            return
        entries = isinstance(value, Mapping)
        try:
            values = self.tell("\n".join(f"{k}={v}" for k, v in value.items()) if entries else str(value))
        except RuntimeError as error:
            raise self._peer_error(f"agreeing on {what}", error) from error
        if any(v != values[0] for v in values):
            lines = "\n".join(f"  rank {r}: {v}" for r, v in enumerate(_differences(values)))
            message = f"the ranks of this group disagree on {what}:\n{lines}"
            raise DisagreementError(f"{message}\n{hint}" if hint else message)

    def _make_name(self) -> int:
        """A number all ranks of this group share and no other object has, for keys in the job's store."""
        mine = torch.tensor([uuid.uuid4().int >> 66], device=self.device)
        return int(self.all_gather(mine).wait()[0])

    def tell(self, value: str) -> list[str]:
        """Every rank's value by the job's store: no message that a rank which skips the comparison could mistake.
        Collective; blocks the host."""
        store, n = self._store("agree"), self._agreements
        self._agreements += 1
        store.set(f"{n}/{self.rank}", value)
        keys = [f"{n}/{r}" for r in range(self.size)]
        store.wait(keys, self.timeout)
        values = [store.get(key).decode() for key in keys]
        if n > 0:  # every rank has posted n, so every rank has read n - 1
            store.delete_key(f"{n - 1}/{self.rank}")
        return values

    def _store(self, purpose: str) -> dist.Store:
        job = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"ring_la/{self.name}/{purpose}", job)

    # -- waiting and failing -------------------------------------------------------------------------------

    def _pending(self, what: str, post: Callable[[], Sequence[Work]], result: Callable[[], Any]) -> Pending:
        """Post a message; a peer that is already gone shows here, one that dies later in ``wait()``."""
        self.refuse_late(what, self._late())
        try:
            works = post()
        except RuntimeError as error:
            raise self._peer_error(what, error) from error

        def finish() -> Any:
            start = time.perf_counter()
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._peer_error(what, error) from error
            self.wait_seconds += time.perf_counter() - start
            return result()

        return Pending(finish)

    def refuse_late(self, what: str, late: Sequence[int]) -> None:
        """Raise a `PeerError` that names ranks whose messages did not come in time, if there are any."""
        if late:
            names = self._names(late)
            raise PeerError(f"rank {self.rank} of {self.size} before {what}: no message from {names} in time")

    def _late(self) -> list[int]:
        return self.transport.late() if self.mailboxes is None else self.mailboxes.late()

    def _peer_error(self, what: str, error: Exception) -> PeerError:
        """Name the ranks that did not report this failure too: they died or stalled."""
        missing = self._silent_ranks()
        culprit = f"no sign of life from {self._names(missing)}" if missing else "every rank reports the same failure"
        first = str(error).splitlines()[0]
        return PeerError(f"rank {self.rank} of {self.size} failed while {what}: {culprit}. Cause: {first}")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {r} (global rank {self.global_ranks[r]})" for r in ranks)

    def _silent_ranks(self) -> list[int]:
        """Ranks that do not write to the job's store within a few seconds of this failure, the n-th here and there."""
        try:
            store = self._store(f"failed/{self._failures}")
            self._failures += 1
            store.set(str(self.rank), "failed")
            grace = min(5.0, self.timeout.total_seconds())
            deadline, missing = time.monotonic() + grace, [r for r in range(self.size) if r != self.rank]
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not store.check([str(r)])]
                time.sleep(0.02)
            return missing
        except Exception:  # the store itself is gone: its host, global rank 0, is
            return [self.global_ranks.index(0)] if 0 in self.global_ranks else []


def _differences(values: Sequence[str]) -> list[str]:
    """Of each value the lines that not all have; where some are refusals, their reasons alone."""
    if any(v.startswith("refused: ") for v in values):
        return [v if v.startswith("refused: ") else "nothing refused" for v in values]
    told = [v.splitlines() for v in values]
    common = set(told[0]).intersection(*told)
    return [", ".join(line for line in own if line not in common) for own in told]
