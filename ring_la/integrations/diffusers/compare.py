"""Inputs that every rank must give alike, compared at every call."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autograd import first_derivative_only
from ...context import ContextParallel, ShardedLayout
from ...errors import DisagreementError

WHAT = "the inputs of the model, which every rank must be given whole"


class Sent(NamedTuple):
    """Checksums that came with an output.

    Attributes:
        names: of the inputs.
        sums: ``[P, inputs]`` int64 on the CPU.
        event: after which they are there; None: they are.
    """

    names: Sequence[str]
    sums: Tensor
    event: torch.cuda.Event | None


class InputComparison:
    """What ranks are given, compared by all of them.

    Shapes, dtypes and what is no tensor: by the job's store before each call, which waits for no device. Values:
    before the first call by name (with validate="always" before each); later by checksums made on the device, which
    travel as one more row of the output. Where reading them waits for no device, a call that got different inputs
    raises. On a GPU its output is NaN, and the next call that finds the checksums on the host raises, on all ranks.

    Attributes:
        waits: whether checksums are read at once.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.waits = cp, cp.device.type == "cpu"
        self._first, self._names, self._sums = True, [], None  # type: ignore[var-annotated]
        self._sent: deque[Sent] = deque(maxlen=64)

    def begin(self, given: Mapping[str, Any], error: Exception | None) -> None:
        """Before a call: agree on its inputs, or raise on every rank what is wrong with one's."""
        cp, self._sums = self.cp, None
        if cp.validate != "never" and cp.size > 1:
            whole, capturing = cp.validate == "always" or self._first, _capturing(cp.device)
            late = "" if capturing else self._late()
            try:
                refused = late or error
                facts = {name: _facts(x, whole) for name, x in given.items()}
                cp.comm.agreement.agree(WHAT, f"refused: {refused}" if refused else facts)
            except DisagreementError:
                self._sent.clear()  # all ranks know
                raise
            if late:
                raise DisagreementError(late)
            self._first = self._first and error is not None
            if not whole and error is None:
                self._names, self._sums = _checksums(given, cp.device, capturing)  # type: ignore[assignment]
        if error is not None:
            raise error

    def shapes(self, given: Mapping[str, Any]) -> None:
        """Agree on shapes, dtypes and what is no tensor, where a call itself may compare nothing."""
        if self.cp.validate != "never" and self.cp.size > 1:
            self.cp.comm.agreement.agree(WHAT, {name: _facts(x, False) for name, x in given.items()})

    def rows(self, like: Tensor) -> Tensor | None:
        """The checksums of this call as rows like those of ``like [T, …]``."""
        if self._sums is None:
            return None
        width = like[:1].numel() * like.element_size()
        raw = self._sums.view(torch.uint8)
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % width))
        return raw.view(like.dtype).view(-1, *like.shape[1:])

    def found(self, rows: Tensor) -> Tensor | None:
        """What every rank's `rows` ``[P, rows, …]`` say; where nobody can wait for it, a bool on the device: whether
        inputs differ.

        Raises:
            DisagreementError: they do.
        """
        names, self._sums = self._names, None
        sums = rows.reshape(len(rows), -1).view(torch.uint8)[:, : 8 * len(names)].contiguous().view(torch.int64)
        if self.waits:
            told = _told(Sent(names, sums, None))
            if told:
                raise DisagreementError(told)
            return None
        if _capturing(sums.device):  # in a replay nobody reads them: the output is NaN
            return (sums != sums[:1]).any()
        if sums.is_cuda:
            there = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True, device="cpu").copy_(
                sums, non_blocking=True
            )
            event = torch.cuda.Event()
            event.record()
            self._sent.append(Sent(names, there, event))
        else:
            self._sent.append(Sent(names, sums, None))
        return (sums != sums[:1]).any()

    def _late(self) -> str:
        """What the checksums of earlier calls say that have come by now."""
        while self._sent and (self._sent[0].event is None or self._sent[0].event.query()):
            told = _told(self._sent.popleft())
            if told:
                self._sent.clear()
                return told
        return ""


class WholeImage(torch.autograd.Function):
    """All ranks' rows, along `dim`. The result is the same on all ranks and so is its gradient, of which each takes
    its rows, times `scale`. The checksums of the call's inputs travel with them."""

    @staticmethod
    def forward(ctx, x: Tensor, layout: ShardedLayout, dim: int, scale: int, comparison: InputComparison) -> Tensor:
        ctx.layout, ctx.dim, ctx.scale = layout, dim, scale
        rows, longest = x.movedim(dim, 0), max(layout.lengths)
        more = comparison.rows(rows)
        sent = rows.new_zeros(longest + (0 if more is None else len(more)), *rows.shape[1:])
        sent[: len(rows)] = rows
        if more is not None:
            sent[longest:] = more
        came = layout.cp.comm.all_gather(sent).wait()
        out = torch.cat([part[:n] for part, n in zip(came, layout.lengths)]).movedim(0, dim)
        differs = None if more is None else comparison.found(came[:, longest:])
        return out.contiguous() if differs is None else out.masked_fill(differs, torch.nan)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        return ctx.layout.shard(grad, ctx.dim) * ctx.scale, None, None, None, None


def _told(sent: Sent) -> str:
    """Which inputs of which ranks are not rank 0's."""
    other = (sent.sums != sent.sums[:1]).tolist()
    found = [f"{name} of rank {r}" for r, row in enumerate(other) for name, differs in zip(sent.names, row) if differs]
    return f"the ranks of this group disagree on {WHAT}: {', '.join(found)} not as rank 0's" if found else ""


def _facts(x: object, whole: bool) -> object:
    """What must be the same of an input on all ranks; if `whole` values of tensors too, which waits for the device."""
    if isinstance(x, Tensor):
        facts = f"{x.dtype} {list(x.shape)}, gradient {x.requires_grad}"
        return f"{facts}, checksum {_crc(x)}" if whole else facts
    if isinstance(x, (tuple, list)):
        return [_facts(one, whole) for one in x]
    if isinstance(x, Mapping):
        return {n: _facts(one, whole) for n, one in x.items()}
    return x if isinstance(x, (bool, int, float, str)) else type(x).__name__


def _crc(x: Tensor) -> int:
    """A checksum of the values; waits for the device."""
    values = torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    values.copy_(x.detach().flatten())  # a clone of one value keeps stride 0
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def _checksums(given: Mapping[str, Any], device: torch.device, there: bool = False) -> tuple[list[str], Tensor | None]:
    """The names of inputs that hold tensors, and a checksum of each, int64 on `device`; waits for nothing. With `there`
    those alone that are on the device."""
    found = {name: [t for t in tensors_in(x) if not there or t.device == device] for name, x in given.items()}
    sums = {name: [_checksum(t).to(device, non_blocking=True) for t in each] for name, each in found.items()}
    sums = {name: torch.stack(each) for name, each in sums.items() if each}  # type: ignore[misc]
    sums = {name: (each * _odd(len(each), device)).sum() for name, each in sums.items()}  # type: ignore[attr-defined]
    return list(sums), torch.stack(list(sums.values())) if sums else None  # type: ignore[arg-type]


def _checksum(x: Tensor) -> Tensor:
    """A number that other values, or the same in another order, hardly have: bits times odd numbers, modulo 2**64."""
    x = x.detach().contiguous().flatten()
    if x.is_complex():
        x = torch.view_as_real(x).flatten()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.view(kinds[x.element_size()]).to(torch.int64)
    return (bits * _odd(len(bits), x.device)).sum()


def _odd(n: int, device: torch.device) -> Tensor:
    """`n` odd numbers that no short sum of repeats: multiples of 2**64 divided by the golden ratio, made odd."""
    return (torch.arange(1, n + 1, device=device) * -7046029254386353131) | 1


def tensors_in(x: object) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = list(x.values())
    return [t for one in x for t in tensors_in(one)] if isinstance(x, (tuple, list)) else []


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and mappings with every tensor changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):  # the library's outputs are, in classes of their own
        made = {n: mapped(one, change) for n, one in x.items()}
        return made if type(x) is dict else type(x)(**made)
    return type(x)([mapped(one, change) for one in x]) if type(x) in (list, tuple) else x


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
