"""A split call but for its tensors, and the exchange of states between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algebra import Affine, Rule, Transition, transpose
from ..comm import Pending
from ..context import CANONICAL_CHUNK, ShardedLayout
from ..kernels import Adjoint, Backward, CanonicalChunks, Inputs, Local, OutputUse, Summary, make_local, state_dtype
from ..scan import STRATEGIES, Exchange, Horizon, Link, MailboxBorder, carries
from .seams import Crossing, Seams
from .states import with_arrived


@dataclass(frozen=True)
class SplitCall:
    """Everything about one sharded call but its tensors."""

    rule: Rule
    layout: ShardedLayout
    scale: float
    mode: str
    backend: str | None
    output_final_state: bool
    decays: tuple[float, ...] | None = None
    saves: bool = True
    """Whether a backward pass may follow (within a Function this cannot be asked)."""

    @classmethod
    def kept(cls, layout: ShardedLayout, rule: Rule, *more: Any) -> SplitCall:
        """A call on a layout, made once."""
        return layout.kept(cls, lambda: cls(rule, layout, *more), rule, *more)

    @cached_property
    def seams(self) -> Seams:
        return Seams.of(self.layout)

    @property
    def canonical(self) -> CanonicalChunks | None:
        """Chunks at fixed places of the sequence, where results must not depend on the split."""
        return CanonicalChunks(CANONICAL_CHUNK, self.seams.lead) if self.layout.cp.deterministic else None

    @property
    def kind(self) -> Transition:
        return self.rule.transition

    @cached_property
    def single(self) -> bool:
        """Whether this rank's tokens are one piece, which may begin anywhere."""
        return len(self.layout.pieces) <= 1 and (self.canonical is None or not self.layout.pieces)

    def cu_pieces(self, inputs: Inputs) -> Tensor | None:
        """Where this rank's pieces begin, and the last one ends; None: there is one."""
        return None if self.single else self.layout.cu_pieces.to(inputs.q.device)

    def local(self, inputs: Inputs, mode: str, final: bool = True) -> Local[Any, Any]:
        """What computes this rank's tokens; `final`: whether the states that leave are wanted."""
        layout, cu = self.layout, self.cu_pieces(inputs)
        canonical = None if self.single else self.canonical
        if layout.cp.deterministic and mode == "auto":
            mode = "chunk"  # whatever this rank's length
        use = OutputUse(saved=self.saves, final=final, alone=self.seams.alone)
        return make_local(self.rule, inputs, cu, self.scale, mode, self.backend, use, canonical)

    def exchange(self, links: list[Link], like: Tensor) -> Exchange:
        """Post the scan of `links`; its result is the state entering each owned link, in chain order."""
        cp, chain, maps = self.layout.cp, self.seams.chain, Affine(self.kind, None, like)
        horizon = self._split(maps)
        if horizon is not None:
            return horizon.start(chain, links, maps, cp.comm, cp.strategy)
        return cp.strategy(chain, maps).start(chain, links, maps, cp.comm)

    def exchange_back(self, links: list[Link], like: Tensor, kept: Sequence[Tensor | None]) -> Pending:
        """Post the scan of gradients, right to left, given what `exchange` kept."""
        cp, chain, maps = self.layout.cp, self.seams.chain, Affine(self.kind, None, like)
        horizon = self._split(maps)
        if horizon is not None:
            return horizon.start_back(chain, links, maps, cp.comm, kept, cp.strategy)
        return cp.strategy(chain, maps).start_back(chain, links, maps, cp.comm, kept)

    def crossing(self, inputs: Inputs) -> Crossing:
        """What is known of the exchange for inputs of these shapes, found once."""
        seams, rows, dtype = self.seams, inputs.q.shape[0], state_dtype(*inputs)
        shape = (rows, *inputs.state)
        key = self.kind, shape, dtype
        found = seams.crossings.get(key)
        if found is None:
            maps = Affine(self.kind, None, torch.empty(shape, dtype=dtype, device="meta"))
            border = None if seams.alone else self.border(maps)
            seams.crossings[key] = found = Crossing(maps, maps.b.nbytes, border)
        return found

    def border(self, maps: Affine) -> MailboxBorder | None:
        """The exchange as launches of the kernels', where the ring goes by mailboxes: on all ranks or on none."""
        cp, seams = self.layout.cp, self.seams
        by_ring = (
            not cp.deterministic and carries(cp.comm, maps) and cp.strategy(seams.chain, maps) is STRATEGIES["ring"]
        )
        return seams.border(cp.comm) if by_ring else None

    def _split(self, maps: Affine) -> Horizon | None:
        """The horizon, if heads within it go by an exchange of their own."""
        cp, horizon = self.layout.cp, self.horizon(maps)
        pays = horizon is not None and horizon.pays(self.seams.chain, maps, cp.strategy, cp.price)
        return horizon if pays else None

    def horizon(self, maps: Affine) -> Horizon | None:
        """Which heads forget within every segment, under decays the host knows. Mailboxes find out themselves."""
        if self.decays is None or self.border(maps) is not None:
            return None
        return self.seams.horizon(self.decays, maps.b.dtype)


class Exchanged(NamedTuple):
    """After the exchange: the states that enter all pieces, and what went into it; what the way back needs of it, the
    transitions of the owned segments and what the strategy keeps."""

    S0: Tensor | None
    summary: Summary[Any]
    transitions: list[Tensor | None]
    kept: Sequence[Tensor | None]


def exchanged(call: SplitCall, local: Local[Any, Any], S0: Tensor | None, inputs: Inputs) -> Exchanged:
    """Summarise, exchange, and meanwhile do what needs no entering state."""
    seams = call.seams
    horizon = call.horizon(call.crossing(inputs).maps)
    through = any(seams.chain.passes[s] for s in seams.links) and not (horizon and horizon.all_near)
    summary = local.summary(S0, through)
    links = _links(call, summary, lambda piece: _push(local, S0, summary, piece))
    with call.layout.cp.comm.streams.in_order(not local.prepares):
        pending = call.exchange(links, summary.leaving[:, 0])
    summary = local.prepare(summary)
    S0 = with_arrived(S0, summary.leaving, [first for first, _ in seams.segments], pending.wait())
    return Exchanged(S0, summary, [link.map.A for link in links], pending.kept)


def exchanged_back(
    call: SplitCall,
    local: Local[Any, Any],
    backward: Backward,
    dS_end: Tensor | None,
    transitions: Sequence[Tensor | None],
    kept: Sequence[Tensor | None],
) -> tuple[Tensor | None, Adjoint[Any]]:
    """The gradients of the states leaving all pieces, and what went into the exchange."""
    segments, kind, chain = call.seams.segments, call.kind, call.seams.chain
    adjoint = local.adjoint(backward, dS_end)
    dS0 = adjoint.entering
    maps = [Affine(kind, transpose(kind, A), dS0[:, first]) for (first, _), A in zip(segments, transitions)]
    links = [Link(m) for m in maps]
    if call.layout.cp.deterministic:
        through = [chain.passes[s] for s in call.seams.links]
        pushed = [_push_back(local, backward, dS_end, dS0, last) for _, last in segments]
        links = [Link(m, push if passes else None) for m, push, passes in zip(maps, pushed, through)]
    pending = call.exchange_back(links[::-1], dS0[:, 0], kept)
    adjoint = local.prepare_gradients(backward, adjoint)
    return with_arrived(dS_end, dS0, [last for _, last in segments], pending.wait()[::-1]), adjoint


def _links(call: SplitCall, summary: Summary[Any], push: Callable[[int], Callable[[Tensor], Tensor]]) -> list[Link]:
    """The map of each owned segment: its only piece's transition where a state passes, its last piece's state."""
    seams, kind, A = call.seams, call.kind, summary.transition
    deterministic = call.layout.cp.deterministic
    out = []
    for s, (first, last) in zip(seams.links, seams.segments):
        passes = seams.chain.passes[s]
        transition = A[:, first] if passes and A is not None else None
        link = Affine(kind, transition, summary.leaving[:, last])
        out.append(Link(link, push(first) if passes and deterministic else None))
    return out


def _push(local: Local[Any, Any], S0: Tensor | None, summary: Summary[Any], piece: int) -> Callable[[Tensor], Tensor]:
    """A state through one piece, chunk by chunk: the canonical fold."""

    def push(state: Tensor) -> Tensor:
        S = torch.zeros_like(summary.leaving) if S0 is None else S0.clone()
        S[:, piece] = state
        return local.summary(S, False, summary).leaving[:, piece]

    return push


def _push_back(
    local: Local[Any, Any], backward: Backward, dS_end: Tensor | None, like: Tensor, piece: int
) -> Callable[[Tensor], Tensor]:
    """The gradient of the state that leaves a piece, through it chunk by chunk: the canonical fold of the way back."""

    def push(gradient: Tensor) -> Tensor:
        dS = torch.zeros_like(like) if dS_end is None else dS_end.clone()
        dS[:, piece] = gradient
        return local.adjoint(backward, dS).entering[:, piece]

    return push
