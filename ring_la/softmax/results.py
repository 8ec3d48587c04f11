"""Results of softmax attention that outlast a recomputation, which then computes all but them again.

    kept = Kept()
    with kept.made():   forward             o and lse of every call are kept, in order
    with kept.again():  the same code       its calls take them from there

The backward pass of a call needs its tensors, o and lse. The tensors come from projections; o and lse take T²
operations, and the bytes of one activation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import UnsupportedError


class ResultsPlan(Protocol):
    """What a call runs by: its results, and what its backward pass needs, computed or of results there are."""

    def forward(self, x: Any) -> tuple[Tensor, Tensor, Any]: ...

    def saved(self, x: Any, o: Tensor, lse: Tensor) -> Any: ...


class Kept:
    """The results of the calls within one run of code. `again` may be entered often.

    Args:
        pack, unpack: how a tensor is kept, and the tensor of what is kept; None: as it is.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any] | None = None, unpack: Callable[[Any], Tensor] | None = None
    ) -> None:
        self.pack, self.unpack = pack or _itself, unpack or _itself
        self.results: list[tuple[_Result, _Result]] = []

    def made(self) -> _Within:
        """A context manager around the first run."""
        return _Within(lambda: _Making(self))

    def again(self) -> _Within:
        """A context manager around the same code, run again."""
        return _Within(lambda: _Taking(self))


def results(plan: ResultsPlan, x: Any) -> tuple[Tensor, Tensor, Any]:
    """`plan.forward`, or what was kept of it where the code around it is run again."""
    run = _RUN.get()
    return plan.forward(x) if run is None else run(plan, x)


_RUN: ContextVar[_Making | _Taking | None] = ContextVar("_RUN", default=None)


class _Result(NamedTuple):
    packed: Any
    version: int

    @classmethod
    def of(cls, x: Tensor, pack: Callable[[Tensor], Any]) -> _Result:
        return cls(pack(x.detach()), x._version)

    def tensor(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        x = unpack(self.packed)
        if x is self.packed and x._version != self.version:
            hint = "Write o * gate, not o.mul_(gate)"
            raise UnsupportedError("keep_attention", "results that nobody writes into", "one changed in place", hint)
        return x.detach()


class _Making:
    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def __call__(self, plan: ResultsPlan, x: Any) -> tuple[Tensor, Tensor, Any]:
        o, lse, saved = plan.forward(x)
        self.kept.results.append((_Result.of(o, self.kept.pack), _Result.of(lse, self.kept.pack)))
        return o, lse, saved


class _Taking:
    def __init__(self, kept: Kept) -> None:
        self.kept, self.next = kept, 0

    def __call__(self, plan: ResultsPlan, x: Any) -> tuple[Tensor, Tensor, Any]:
        if self.next >= len(self.kept.results):
            got = f"call {self.next + 1} of {len(self.kept.results)}"
            raise UnsupportedError("keep_attention", "the same calls of attention when they are run again", got)
        o, lse = (result.tensor(self.kept.unpack) for result in self.kept.results[self.next])
        self.next += 1
        return o, lse, plan.saved(x, o, lse)


class _Within:
    """Lets calls go through what `run` makes; may be entered often."""

    def __init__(self, run: Callable[[], _Making | _Taking]) -> None:
        self.run = run
        self.tokens: list[Token] = []

    def __enter__(self) -> None:
        self.tokens.append(_RUN.set(self.run()))

    def __exit__(self, *error: object) -> None:
        _RUN.reset(self.tokens.pop())


def _itself(x: Tensor) -> Tensor:
    return x
