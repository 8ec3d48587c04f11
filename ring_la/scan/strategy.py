"""What every scan strategy is: an exclusive scan of affine maps over the links of a chain.

A strategy gets, for each link its rank owns (in chain order), the link's `Affine` map, and returns the state that
enters each of them: ``S_in[0] = 0``-like links get None, others ``S_in[i+1] = map_i(S_in[i])``. It knows an
affine monoid, a chain and a group; nothing of attention, nothing of kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..algebra import Affine, transition_shape
from ..comm import Group, Pending
from .chain import Chain


@dataclass(frozen=True)
class Link:
    """One owned link: its map, and optionally how to push a state through it token by token.

    Attributes:
        map: the affine map of the link (its A is None where the chain says nothing passes).
        push: ``S_in -> S_out`` folding the link's canonical parts one by one; used instead of ``map`` by
            strategies that apply a link to a state, so that results do not depend on where links begin.
    """

    map: Affine
    push: Callable[[Tensor], Tensor] | None = None

    def out(self, incoming: Tensor | None, passes: bool) -> Tensor:
        """The state that leaves this link."""
        if incoming is None or not passes:
            return self.map.b
        return self.push(incoming) if self.push else self.map(incoming)


Pattern = Literal["hop", "link", "swap", "gather", "exchange"]


class Messages(NamedTuple):
    """Messages on the critical path of an exchange, one after the other.

    Attributes:
        pattern: "hop" (from one rank to the next), "link" (the same by `mailbox_ring`, the map applied on the way),
            "swap" (every rank sends one and receives one), "gather" or "exchange" (all to all).
        size: bytes a rank receives in each.
        count: how many.
    """

    pattern: Pattern
    size: float
    count: int = 1  # type: ignore[assignment]


@dataclass(frozen=True)
class Cost:
    """What an exchange costs, in units a cost model can turn into seconds.

    Attributes:
        received: bytes the rank that receives most receives.
        messages: the messages of the critical path.
        applied: states sent through a map on the critical path, in whole states (a fold of P maps: P − 1).
        composed: maps composed with maps, likewise.
        copied: bytes packed, cut and joined on the way.
        posted, operations: messages and tensor operations the busiest rank's host launches: where the device is fast,
            the host's time is what counts.
    """

    received: float = 0.0
    messages: tuple[Messages, ...] = ()
    applied: float = 0.0
    composed: float = 0.0
    copied: float = 0.0
    posted: int = 0
    operations: int = 0


def sizes(like: Affine) -> tuple[int, int]:
    """Bytes of the state and of the transition of maps like this one."""
    shape = transition_shape(like.kind, like.b.shape)
    return like.b.nbytes, 0 if shape is None else shape.numel() * like.b.element_size()


class Exchange(Pending):
    """A scan under way.

    Attributes:
        kept: once it was waited for, what `Scan.start_back` needs of it.
    """

    def __init__(self, finish: Callable[[], list[Tensor | None]], kept: Sequence[Tensor | None] = ()) -> None:
        super().__init__(finish)
        self.kept = kept


def applying(like: Affine) -> int:
    """Tensor operations of applying a map like this one: a product of matrices takes a host as long as three."""
    return 3 if like.kind == "dense" else 1


class Scan(Protocol):
    """An exchange of states across ranks."""

    name: str

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Exchange:
        """Post the exchange; the result of ``wait()`` is a list with the state entering each owned link.

        An entry is None where the link needs no state. `links` holds the links owned by this rank, in chain
        order; `like` is a map of their shapes, dtype and device (its values are not used), for ranks that own
        none. Collective over the group.
        """
        ...

    def start_back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None]
    ) -> Pending:
        """Post the scan of gradients over ``chain.reversed``, whose owned links, in its order, are `links`: the
        transposed maps. `chain` and `kept` are those of the exchange forward, so that no transition is sent again."""
        ...

    def cost(self, chain: Chain, like: Affine) -> Cost:
        """What one exchange over `chain` costs for maps like `like`, whose tensors may be on the meta device."""
        ...

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        """The same for the exchange of gradients, right to left."""
        ...


class Steps(Exchange):
    """An exchange written as a generator that yields before each wait.

    On the CPU, and in order (`MessageStreams.in_order`), it runs to its first wait when posted and to its end in
    ``wait()``; else on CUDA it is queued whole on a side stream when posted, so that it runs beside the caller's
    kernels without the host.
    """

    def __init__(
        self,
        steps: Iterator[None],
        result: list[Tensor | None],
        keep: object,
        group: Group,
        kept: Sequence[Tensor | None] = (),
    ) -> None:
        self._stream = group.streams.beside
        self._keep = keep  # tensors the side stream reads, until the caller's stream has waited for it
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(group.device))
            with torch.cuda.stream(self._stream):
                for _ in steps:
                    pass
        else:
            next(steps, None)

        def finish() -> list[Tensor | None]:
            with group.streams.in_order():
                for _ in steps:
                    pass
            if self._stream is not None:
                current = torch.cuda.current_stream(group.device)
                current.wait_stream(self._stream)
                for t in (*result, *kept):
                    if t is not None:
                        t.record_stream(current)
            self._keep = None
            return result

        super().__init__(finish, kept)


class Stepped(ABC):
    """A scan that is a generator of `Steps` each way, which keeps what its way back needs."""

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Exchange:
        result: list[Tensor | None] = [None] * len(links)
        kept: list[Tensor | None] = []
        return Steps(self._forward(chain, links, like, group, result, kept), result, links, group, kept)

    def start_back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None]
    ) -> Pending:
        result: list[Tensor | None] = [None] * len(links)
        return Steps(self._back(chain, links, like, group, kept, result), result, (links, kept), group)

    @abstractmethod
    def _forward(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None],
        kept: list[Tensor | None],
    ) -> Iterator[None]:  # fmt: skip
        """Fill `result` and `kept`, yielding before each wait."""

    @abstractmethod
    def _back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None],
        result: list[Tensor | None],
    ) -> Iterator[None]:  # fmt: skip
        """The same for gradients."""


def fold(chain: Chain, maps: Sequence[Affine], links: Sequence[int]) -> list[Tensor | None]:
    """The state entering each of `links` (in chain order), folded from the maps of all links before them in one go."""
    wanted = [i for i in links if chain.needs[i]]
    entering: dict[int, Tensor] = {}
    state: Tensor | None = None
    for i in range(min(map(chain.first_source, wanted)) if wanted else 0, wanted[-1] if wanted else 0):
        m = maps[i]
        state = m.b if state is None or not chain.passes[i] else m(state)
        if i + 1 in wanted:
            entering[i + 1] = state
    return [entering.get(i) for i in links]
