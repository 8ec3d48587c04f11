"""What the backward pass needs, kept in host memory meanwhile, copied beside the computation.

    with Offload(in_flight=2 << 30) as offload:
        loss = model.loss(...)                     # what autograd keeps goes to the host
    loss.backward()                                # and comes back, a little ahead of its use

With recomputation of whole blocks (`recompute(model, ["block"])`, or Transformers' gradient checkpointing) what
autograd keeps is one tensor a block, so little travels. A device copies on a stream of its own into pinned memory. A
tensor's memory on the device is free once its copy is done; back-pressure: where more than `in_flight` bytes wait for
that, the host waits for the oldest, so that the device never holds much more than that of tensors on their way.
Backward, a tensor that is asked for brings the `ahead` tensors kept before it on their way too, and the host, which
launches faster than a device computes, waits where more than `in_flight` bytes came back that the device has not used.

Without a GPU the copies are made at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_int
from ..errors import ArgumentError


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """A context manager around a forward pass.

    Args:
        in_flight: bytes on their way to the host, or back and not used, at most, but for one tensor.
        least: smaller tensors stay where they are, bytes.
        ahead: tensors that are fetched before they are asked for.

    Attributes:
        moved: bytes that went to the host. most_in_flight: the most that were on their way there at once.

    Raises:
        ArgumentError: a number below its least.
    """

    def __init__(self, in_flight: int = 2 << 30, least: int = 1 << 20, ahead: int = 1) -> None:
        for name, value in (("in_flight", in_flight), ("least", least), ("ahead", ahead)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ArgumentError(name, "a number ≥ 0", repr(value))
        check_int("ahead", ahead, 0)
        self.in_flight, self.least, self.ahead = in_flight, least, ahead
        self.moved = self.most_in_flight = 0
        self._waiting: deque[_Kept] = deque()
        self._taken = _Taken(in_flight)
        self._order: list[weakref.ref[_Kept]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._tokens: list[Token] = []
        super().__init__(self.pack, self.unpack)

    def __enter__(self) -> Offload:  # type: ignore[override]  # PyTorch's gives None, to nobody's use
        super().__enter__()
        self._tokens.append(_AROUND.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _AROUND.reset(self._tokens.pop())
        super().__exit__(*error)

    @staticmethod
    def around() -> Offload | None:
        """The innermost one that this code runs in."""
        return _AROUND.get()

    def pack(self, x: Tensor) -> Tensor | _Kept:
        """A tensor on its way to the host; itself where it is small, a parameter, or of a class of its own."""
        if x.nbytes < self.least or isinstance(_owner(x), nn.Parameter) or type(x) is not Tensor:
            return x
        kept = _Kept(x, self._stream(x.device), len(self._order))
        self.moved += x.nbytes
        self._order.append(weakref.ref(kept))
        self._waiting.append(kept)
        self.most_in_flight = max(self.most_in_flight, self._relieve())
        return kept

    def _relieve(self) -> int:
        """Let go of tensors whose copies are done, and wait for the oldest while too much is on its way; bytes left."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().let_go()
        left = sum(kept.bytes for kept in self._waiting)
        while len(self._waiting) > 1 and left > self.in_flight:
            oldest = self._waiting.popleft()
            oldest.let_go(wait=True)
            left -= oldest.bytes
        return left

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """What `pack` was given, on its device."""
        if isinstance(kept, Tensor):
            return kept
        self._relieve()
        self._taken.make_room(kept.bytes)
        for place in range(kept.place, max(-1, kept.place - self.ahead - 1), -1):
            other = self._order[place]()
            if other is not None:
                other.fetch()
        x = kept.take()
        if kept.stream is not None:
            self._taken.add(kept.bytes, torch.cuda.current_stream(kept.device).record_event())
        return x

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


_AROUND: ContextVar[Offload | None] = ContextVar("_AROUND", default=None)


def _owner(x: Tensor) -> Tensor:
    """The tensor whose memory this is."""
    return x if x._base is None else x._base


class _Taken:
    """Tensors that came back, each with an event that the device reaches when it begins to use them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.begun: deque[tuple[int, Any]] = deque()

    def make_room(self, wanted: int) -> None:
        """Wait until the device is done with the oldest, while these and `wanted` bytes are too many; not for the last
        one, so that the device has work meanwhile."""
        while len(self.begun) > 1 and self.bytes + wanted > self.limit:
            done, _ = self.begun.popleft()
            self.bytes -= done
            self.begun[0][1].synchronize()  # with the next begun, this one is used

    def add(self, size: int, event: Any) -> None:
        self.begun.append((size, event))
        self.bytes += size


class _Kept:
    """One tensor in host memory."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, place: int) -> None:
        self.device, self.stream, self.place, self.bytes = x.device, stream, place, x.nbytes
        self.source: Tensor | None = x.detach()
        self.version, self.spoiled = x._version, False  # of its memory; changed while it was copied
        self.back: Tensor | None = None
        self.event: Any = None  # of the last copy
        self.host = torch.empty_like(x, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self.host.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(self.source, non_blocking=True)
            self.event = stream.record_event()

    def done(self) -> bool:
        """Whether the copy to the host is made."""
        return self.event is None or self.event.query()

    def let_go(self, wait: bool = False) -> None:
        """The device's tensor is not needed any more; `wait` until its copy is made."""
        if wait and self.event is not None:
            self.event.synchronize()
        self._look()
        self.source = None

    def _look(self) -> None:
        """Note that the tensor on the device is another than was kept, and so may be its copy."""
        self.spoiled |= self.source is not None and self.source._version != self.version

    def fetch(self) -> None:
        """Start the way back; a tensor that is on the device still is taken as it is."""
        if self.back is not None or self.source is not None:
            return
        if self.stream is None:
            self.back = self.host.to(self.device, copy=True)
            return
        with torch.cuda.stream(self.stream):
            self.back = torch.empty_like(self.host, device=self.device)
            self.back.copy_(self.host, non_blocking=True)
            self.event = self.stream.record_event()

    def take(self) -> Tensor:
        """The tensor on its device, for the current stream."""
        self._look()
        if self.spoiled:
            raise RuntimeError(
                "a tensor that the backward pass needs was changed in place before Offload had copied it"
            )
        self.fetch()
        x = self.source if self.source is not None else self.back
        assert x is not None
        if self.stream is not None and self.back is not None:
            current = torch.cuda.current_stream(self.device)
            assert self.event is not None
            current.wait_event(self.event)  # of this tensor alone: those fetched ahead are on their way still
            x.record_stream(current)
        return x
