"""A split recurrence in fp64, piece by piece: the right one, and the wrong ones that `Edits` describe.

Every piece of a document on a rank is one call of the reference, from the state that the piece before it left. A
mistake of a split implementation is another choice of that state, or of what flows back through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..layout import Piece
from .cases import Case, Numbers
from .operations import find
from .outcome import Whole
from .split import Split


@dataclass
class ChainPass:
    """A pass over the pieces, as it goes.

    Attributes:
        initial: the state each document starts from, a copy for each rank.
        calls: the reference on each piece's tokens, given a state: their o, and the state they leave.
        left: the state each piece so far has left. wrote: the same without what entered it.
    """

    case: Case
    split: Split
    initial: list[Tensor]
    calls: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    wrote: list[Tensor] = field(default_factory=list)

    def before(self, i: int) -> int | None:
        """The piece before piece i in its document."""
        piece = self.split.pieces[i]
        return None if piece.first else i - 1

    def start(self, i: int) -> Tensor:
        """The state that the document of piece i starts from."""
        piece = self.split.pieces[i]
        return self.initial[self.owner(i)][rows(self.case, piece)]

    def owner(self, i: int) -> int:
        """The rank that holds piece i."""
        return self.split.segments[self.split.pieces[i].segment].owner

    def entering(self, i: int) -> Tensor:
        """The state that enters piece i."""
        before = self.before(i)
        return self.start(i) if before is None else self.left[before]


@dataclass(frozen=True)
class Edits:
    """What is done wrong; the defaults are right.

    Attributes:
        entering: the state that enters piece i, given the state that does rightly.
        inside: only the piece's own tokens see that state; what it leaves is right.
        leaving: the state that piece i leaves, given (run, i, the right one).
        inputs: changes all inputs before anything is computed.
        final: a rank's final states, given (run, rank, the right ones).
        dfinal: multiplies what flows back into the final state.
        through: gives a piece's o and final state in place of the plain call, given (call, tokens, state).
    """

    entering: Callable[[ChainPass, int, Tensor], Tensor] | None = None
    inside: bool = False
    leaving: Callable[[ChainPass, int, Tensor], Tensor] | None = None
    inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    final: Callable[[ChainPass, int, Tensor], Tensor] | None = None
    dfinal: float = 1.0
    through: Callable[[Callable, dict[str, Tensor], Tensor], tuple[Tensor, Tensor]] | None = None


def rows(case: Case, piece: Piece) -> slice:
    """A piece's rows of the states."""
    return slice(None) if case.cu_seqlens is None else slice(piece.document, piece.document + 1)


def run_chain(case: Case, numbers: Numbers, edits: Edits = Edits()) -> Whole:
    """The output, final states and gradients of a case, with these mistakes."""
    operation, split, P = find(case.operation), case.split, case.size
    tokens = {n: x.double().clone().requires_grad_() for n, x in numbers.inputs.items() if n not in operation.shared}
    shared = [{n: numbers.inputs[n].double().clone().requires_grad_() for n in operation.shared} for _ in range(P)]
    assert operation.state is not None, "attention has no chain"
    empty = numbers.do.new_zeros(case.documents, *operation.state(case.shapes))
    given = empty if numbers.initial_state is None else numbers.initial_state.double()
    initial = [given.clone().requires_grad_() for _ in range(P)]
    run = ChainPass(case, split, initial)
    o = _outputs(run, numbers, tokens, shared, edits)
    final = _final(run, given)
    loss = (o * numbers.do).sum()
    finals = [final if edits.final is None else edits.final(run, r, final) for r in range(P)]
    if numbers.dfinal is not None:
        flowing = [f if f.shape == final.shape else final for f in finals]
        loss = loss + edits.dfinal * sum((f * numbers.dfinal).sum() for f in flowing) / P
    leaves = [*tokens.values(), *(x for own in shared for x in own.values()), *initial]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = iter([torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)])
    out = {"o": o.detach()} | {f"d{n}": next(grads) for n in tokens}
    by_rank = [{n: next(grads) for n in operation.shared} for _ in range(P)]
    parts = {f"d{n}": [own[n] for own in by_rank] for n in operation.shared}
    if numbers.initial_state is None:
        return Whole(out, [], parts)
    return Whole(out, [f.detach() for f in finals], parts | {"dinitial_state": list(grads)})


def _outputs(run: ChainPass, numbers: Numbers, tokens: dict, shared: list, edits: Edits) -> Tensor:
    """o of the whole sequence; fills what the pieces leave."""
    case, outs = run.case, []
    call = _call(case)
    for i, piece in enumerate(run.split.pieces):
        own = {n: x[:, piece.start : piece.stop] for n, x in tokens.items()} | shared[run.owner(i)]
        own = own if edits.inputs is None else edits.inputs(own)
        right = run.entering(i)
        entering = right if edits.entering is None else edits.entering(run, i, right)
        through = edits.through or (lambda call, own, state: call(own, state))
        run.calls.append(partial(call, own))
        o, left = through(call, own, entering)
        if edits.inside and not torch.equal(entering, right):
            left = call(own, right)[1]
        if edits.leaving is not None or edits.entering is not None:
            run.wrote.append(call(own, torch.zeros_like(right))[1])
            left = left if edits.leaving is None else edits.leaving(run, i, left)
        run.left.append(left)
        outs.append(o)
    return torch.cat(outs, 1)


def _call(case: Case) -> Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]:
    """The reference on a piece's tokens from a state: its o, and the state it leaves."""
    reference, options = find(case.operation).reference, dict(case.options)

    def call(own: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out = reference(**own, **options, initial_state=state, output_final_state=True)
        return out.o, out.final_state

    return call


def _final(run: ChainPass, given: Tensor) -> Tensor:
    """The state after each document; an empty one's is what it started from (rank 0's copy of it)."""
    if run.case.cu_seqlens is None:
        return run.left[-1]
    last = {p.document: i for i, p in enumerate(run.split.pieces)}
    starts = run.initial[0]
    return torch.cat([run.left[last[n]] if n in last else starts[n : n + 1] for n in range(len(given))])
