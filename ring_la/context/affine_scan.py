"""States of an affine recurrence along a split sequence, with gradients.

    S_t = A_t S_(t-1) + b_t

Each rank composes its own maps (Hillis and Steele's scan, log2 T products of all steps at once), ranks exchange what
leaves their runs by the strategy of the group, and what enters a run is sent through its composed maps. Backwards the
gradient of each state is a scan of the other direction with the transposed maps:

    G_t = dS_t + (what enters t of the scan of H_t = A_tᵀ H_(t+1) + A_tᵀ dS_t),    db_t = G_t,    dA_t = G_t S_(t-1)ᵀ

A is 0 where a document starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..algebra import Affine, Transition, outer, transition_shape, transpose
from ..autograd import first_derivative_only, full_precision
from ..errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor
from ..scan import Chain, Exchange, Link
from .arguments import check_dense
from .handle import found
from .operator import SplitOperator
from .sharded import ShardedLayout

KINDS: dict[int, Transition] = {3: "scalar", 4: "diagonal", 5: "dense"}


def scan(A: Tensor | None, b: Tensor, layout: ShardedLayout | None, reverse: bool, exclusive: bool) -> Tensor:
    """What `ContextParallel.scan` says; within a compiled graph one node."""
    if torch.compiler.is_compiling() and isinstance(b, Tensor):
        number = layout.number if isinstance(layout, ShardedLayout) else 0 if layout is None else -1  # no layout's
        return _operator(A, b, number, reverse, exclusive)
    error: RingLAError | None = None
    facts: tuple[tuple[str, Any], ...] = ()
    try:
        _check(A, b, layout, reverse, exclusive)
        facts = ("A", None if A is None else Facts.of(A, 1)), ("b", Facts.of(b, 1)), ("reverse", reverse)
        facts = *facts, ("device of b", b.device.type)
    except RingLAError as e:
        error = e
    if isinstance(layout, ShardedLayout):
        layout.agree("scan", (*facts, ("exclusive", exclusive), ("gradients", torch.is_grad_enabled())), error)
    if error is not None:
        raise error
    if A is None and layout is not None and layout.packed:
        A = b.new_ones(b.shape[:3])  # of which those at documents' starts become zero
    kind = "identity" if A is None else KINDS[A.dim()]
    return _Scan.apply(A, b, Walk(kind, layout, reverse), exclusive)


@dataclass(frozen=True)
class Walk:
    """A way along one rank's runs of steps: to the right, or reversed to the left."""

    kind: Transition
    layout: ShardedLayout | None
    reverse: bool

    @property
    def back(self) -> Walk:
        """The other way."""
        return Walk(self.kind, self.layout, not self.reverse)

    @cached_property
    def chain(self) -> Chain:
        chain = Chain.of(self.layout)  # type: ignore[arg-type]
        return chain.reversed if self.reverse else chain

    @cached_property
    def runs(self) -> tuple[slice, ...]:
        """The steps of this rank's runs, in the order of the walk."""
        if self.layout is None:
            return (slice(None),)
        out, start = [], 0
        for s in self.layout.local_segments():
            steps = self.layout.segments[s].stop - self.layout.segments[s].start
            out.append(slice(start, start + steps))
            start += steps
        return tuple(out[::-1] if self.reverse else out)

    def without_starts(self, x: Tensor) -> Tensor:
        """``x [B, T, ...]``, zero at the steps that begin a document on this way."""
        if self.layout is None or not self.layout.packed:
            return x
        layout = self.layout
        starts = layout.successors(layout.rank) < 0 if self.reverse else layout.positions == 0
        return x.masked_fill(starts.to(x.device).view(1, -1, *[1] * (x.dim() - 2)), 0)

    def along(self, x: Tensor) -> Tensor:
        """A run's steps in the order of the walk, or back."""
        return x.flip(1) if self.reverse else x

    def maps(self, A: Tensor | None, b: Tensor) -> list[Affine]:
        """Each run's maps from its entry to behind each step, in the order of the walk."""
        steps = [(None if A is None else self.along(A[:, run]), self.along(b[:, run])) for run in self.runs]
        return [composed(Affine(self.kind, *one)) for one in steps]

    def states(self, maps: Sequence[Affine], entering: Sequence[Tensor | None], exclusive: bool, b: Tensor) -> Tensor:
        """The states behind (or, if `exclusive`, before) each step, in the order of the tokens, shaped like `b`."""
        out = []
        for m, S0 in zip(maps, entering):
            S = m.b if S0 is None else m(S0[:, None].expand_as(m.b))
            if exclusive:
                S = torch.cat([torch.zeros_like(S[:, :1]) if S0 is None else S0[:, None], S[:, :-1]], 1)
            out.append(self.along(S))
        if not out:  # a rank without steps
            return torch.empty_like(b)
        return out[0] if len(out) == 1 else torch.cat(out[::-1] if self.reverse else out, 1)


def composed(m: Affine) -> Affine:
    """Maps of steps ``[B, T, ...]``, each after all before it."""
    A, b, step = m.A, m.b, 1
    while step < b.shape[1]:
        later = Affine(m.kind, None if A is None else A[:, step:], b[:, step:])
        joined = later.after(Affine(m.kind, None if A is None else A[:, :-step], b[:, :-step]))
        A = None if A is None or joined.A is None else torch.cat([A[:, :step], joined.A], 1)
        b = torch.cat([b[:, :step], joined.b], 1)
        step *= 2
    return Affine(m.kind, A, b)


def links_of(walk: Walk, maps: Sequence[Affine]) -> list[Link]:
    """What leaves each run, as the exchange takes it."""
    passes = [walk.chain.passes[i] for i in walk.chain.local(walk.layout.rank)]  # type: ignore[union-attr]
    last = [(m.A[:, -1].contiguous() if m.A is not None and p else None, m.b[:, -1]) for m, p in zip(maps, passes)]
    return [Link(Affine(walk.kind, A, b.contiguous())) for A, b in last]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor | None, b: Tensor, walk: Walk, exclusive: bool) -> Tensor:
        wide = _wide(A, b)
        ctx.dtypes, ctx.walk, ctx.exclusive = (None if A is None else A.dtype, b.dtype), walk, exclusive
        with full_precision(b):
            A, b = None if A is None else walk.without_starts(A.to(wide)), b.to(wide)
            maps, ctx.kept = walk.maps(A, b), ()
            entering: Sequence[Tensor | None] = [None] * len(maps)
            if walk.layout is not None:
                cp, first = walk.layout.cp, b.new_empty(b.shape[:1] + b.shape[2:])
                ctx.like = Affine(walk.kind, None, first)
                exchange: Exchange = cp.strategy(walk.chain, ctx.like).start(
                    walk.chain, links_of(walk, maps), ctx.like, cp.comm
                )
                entering = exchange.wait()
                ctx.kept = exchange.kept
                ctx.way_back = cp.comm.agreement.way_back()
            differentiated = ctx.needs_input_grad[0]
            before = walk.without_starts(walk.states(maps, entering, True, b)) if exclusive or differentiated else None
            ctx.save_for_backward(A, before if differentiated else None)
            return walk.states(maps, entering, False, b) if before is None or not exclusive else before

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dS: Tensor) -> Any:
        A, before = ctx.saved_tensors
        walk, back = ctx.walk, ctx.walk.back
        At = transpose(walk.kind, A)
        if ctx.exclusive:
            added = walk.without_starts(dS)
        else:
            added = dS if At is None else Affine(walk.kind, At, torch.zeros_like(dS))(dS)
        maps = back.maps(At, added)
        entering = [None] * len(maps)
        if walk.layout is not None:
            ctx.way_back()
            cp, links = walk.layout.cp, links_of(back, maps)
            strategy = cp.strategy(walk.chain, ctx.like)
            entering = strategy.start_back(walk.chain, links, ctx.like, cp.comm, ctx.kept).wait()
        G = back.states(maps, entering, True, dS)
        G = G if ctx.exclusive else G + dS
        dA = walk.without_starts(outer(walk.kind, G, before)).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        return dA, G.to(ctx.dtypes[1]), None, None


def _wide(A: Tensor | None, b: Tensor) -> torch.dtype:
    """What states come in."""
    return torch.promote_types(b.dtype if A is None else torch.promote_types(A.dtype, b.dtype), torch.float32)


def _run(A: Tensor | None, b: Tensor, layout: int, reverse: bool, exclusive: bool) -> Tensor:
    """`layout`: its number; 0: none."""
    return scan(A, b, found(layout) if layout else None, reverse, exclusive)


def _fake(A: Tensor | None, b: Tensor, layout: int, reverse: bool, exclusive: bool) -> Tensor:
    return b.new_empty(b.shape, dtype=_wide(A, b))


_operator = SplitOperator("split_scan", _run, _fake, 2)


def _check(A: object, b: object, layout: object, reverse: object, exclusive: object) -> None:
    if layout is not None and not isinstance(layout, ShardedLayout):
        raise ArgumentError("layout", "a layout of ContextParallel, or None", type(layout).__name__)
    for name, flag in (("reverse", reverse), ("exclusive", exclusive)):
        if not isinstance(flag, bool):
            raise ArgumentError(name, "True or False", repr(flag))
    if not isinstance(b, Tensor) or b.dim() != 5 or not b.is_floating_point():
        raise ArgumentError("b", "a float tensor [B, T, H, K, V]", describe_tensor(b))
    if A is not None:
        kind = KINDS.get(A.dim()) if isinstance(A, Tensor) and A.is_floating_point() else None
        if not isinstance(A, Tensor) or kind is None or A.shape != transition_shape(kind, b.shape):
            shape = list(b.shape[:3])
            expected = f"floats of shape {shape}, {shape} and K, or {shape}, K and K, with b's K = {b.shape[3]}"
            raise ArgumentError("A", expected, describe_tensor(A))
        if A.device != b.device:
            raise ArgumentError("A", f"on b's device, {b.device}", A.device)
        check_dense(A, "A")
    if layout is not None:
        check_dense(b, "b")
        layout.require_local("b", b.shape[1])
        layout.require_runs("scan")
        if layout.cp.deterministic:
            raise UnsupportedError("layout", "deterministic=False", "one of a deterministic ContextParallel")
    elif b.shape[1] < 1:
        raise ArgumentError("b", "at least one step", describe_tensor(b))
