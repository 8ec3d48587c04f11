"""Mistakes with names: what each would give for a case, to compare with what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Piece
from .cases import Case, Numbers
from .chain import ChainPass, Edits, rows, run_chain
from .dense import run_dense
from .dense_mistakes import dense_mistakes
from .operations import find
from .outcome import Whole


class Mistake(NamedTuple):
    """A mistake in words, and the tensors it gives for a case."""

    words: str
    gives: Callable[[], Whole]


def right(case: Case, numbers: Numbers) -> Whole:
    """The tensors without a mistake."""
    return run_dense(case, numbers) if case.operation == "attention" else run_chain(case, numbers)


def mistakes(case: Case, numbers: Numbers) -> Iterator[Mistake]:
    """All mistakes that have a name and could show in this case, the plainest first."""
    if case.operation == "attention":
        for words, looks in dense_mistakes(case):
            yield Mistake(words, lambda looks=looks: run_dense(case, numbers, looks))  # type: ignore[misc]
        return
    for group in (_of_states, _of_ranks, _of_documents, _of_edges, _of_inputs, _of_gradients):
        for words, edits in group(case):
            yield Mistake(words, lambda edits=edits: run_chain(case, numbers, edits))  # type: ignore[misc]
    for words, order in _orders(case):
        yield Mistake(words, lambda order=order: _reordered(case, numbers, order))  # type: ignore[misc]


def _orders(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Wrong orders of the tokens."""
    by_rank = torch.cat(case.split.tokens)
    cu = torch.tensor(case.cu_seqlens or (0, case.shapes.T))
    chained = by_rank[torch.searchsorted(cu[1:], by_rank, right=True).argsort(stable=True)]
    if not torch.equal(chained, chained.sort().values):
        yield "segments are chained in the order of the ranks, not of the sequence", chained
    if not torch.equal(by_rank, chained):
        yield "each rank's tokens are taken for a run of the sequence, which they are not", by_rank


def _reordered(case: Case, numbers: Numbers, order: Tensor) -> Whole:
    """What comes of a sequence whose tokens stand in another order, each on its rank, given by the tokens' places."""
    shared, place = find(case.operation).shared, order.argsort()
    own = tuple(place[t] for t in case.split.tokens)
    inputs = {n: x if n in shared else x[:, order] for n, x in numbers.inputs.items()}
    turned = numbers._replace(inputs=inputs, do=numbers.do[:, order])
    found = run_chain(replace(case, kind=lambda *of: own), turned)
    return found._replace(tokens={n: x[:, place] for n, x in found.tokens.items()})


Named = Iterator[tuple[str, Edits]]


def _zero(run: ChainPass, i: int, right: Tensor) -> Tensor:
    return torch.zeros_like(right)


def _crosses(run: ChainPass, i: int) -> bool:
    """Whether a state comes to piece i from another segment."""
    return run.before(i) is not None


def _where(
    when: Callable[[ChainPass, int], bool], gives: Callable[[ChainPass, int, Tensor], Tensor]
) -> Callable[[ChainPass, int, Tensor], Tensor]:
    """`gives` for the pieces of which `when` is true."""
    return lambda run, i, right: gives(run, i, right) if when(run, i) else right


def _of_states(case: Case) -> Named:
    """How states are handed on, on every rank alike."""
    yield "no state crosses from rank to rank", Edits(entering=_where(_crosses, _zero))
    lost = lambda run, i, left: run.wrote[i] + run.entering(i)  # noqa: E731
    yield "states pass a rank without its decay (its transition is left out)", Edits(leaving=lost)
    only = lambda run, i, right: run.wrote[run.before(i)]  # noqa: E731
    yield (
        "a rank takes what the rank before it wrote, without what entered there",
        Edits(entering=_where(_crosses, only)),
    )
    twice = lambda run, i, right: 2 * right  # noqa: E731
    yield "the state that enters a rank is added twice", Edits(entering=_where(_crosses, twice), inside=True)
    if case.states:
        begins = lambda run, i: run.before(i) is None  # noqa: E731
        again = lambda run, i, right: right + run.start(i)  # noqa: E731
        yield "the initial state is ignored", Edits(entering=_where(begins, _zero))
        yield (
            "every rank starts from the initial state",
            Edits(entering=_where(_crosses, lambda run, i, right: run.start(i)), inside=True),
        )
        yield "every rank adds the initial state", Edits(entering=_where(_crosses, again), inside=True)
        first = lambda run, i, right: run.initial[run.owner(i)][:1].expand_as(right)  # noqa: E731
        yield "every document starts from the first one's initial state", Edits(entering=_where(begins, first))
        yield from _of_final_states(case)


def _of_final_states(case: Case) -> Named:
    def own(run: ChainPass, rank: int, right: Tensor) -> Tensor:
        out = torch.zeros_like(right)
        for i, piece in enumerate(run.split.pieces):
            if run.owner(i) == rank:
                out = torch.cat([out[: rows(run.case, piece).start or 0], run.left[i], out[_after(run.case, piece) :]])
        return out

    yield "each rank gives the state after its own tokens as the final state", Edits(final=own)
    flip = lambda run, rank, right: right.transpose(-1, -2)  # noqa: E731
    yield "the final state is transposed", Edits(final=flip)
    for step, which in ((1, "before"), (-1, "after")) if case.documents > 1 else ():
        rolled = lambda run, rank, right, step=step: right.roll(step, 0)  # noqa: E731
        yield f"final states are those of the documents {which}", Edits(final=rolled)
    none = lambda run, rank, right: right if len(run.split.tokens[rank]) else right * 0  # noqa: E731
    if not all(map(len, case.split.tokens)):
        yield "a rank without tokens gives zero as the final state", Edits(final=none)
    yield "the final state is zero", Edits(final=lambda run, rank, right: torch.zeros_like(right))
    for r in range(case.size):
        gone = lambda run, rank, right, r=r: right if rank == r else torch.zeros_like(right)  # noqa: E731
        yield f"only rank {r} has the final state", Edits(final=gone)


def _after(case: Case, piece: Piece) -> int:
    return case.documents if case.cu_seqlens is None else piece.document + 1


def _of_ranks(case: Case) -> Named:
    """One rank that takes a wrong state, with the ranks after it, or alone."""
    owners = [s.owner for s in case.split.segments]
    for shift in (2, 3):
        taken = lambda run, i, right, n=shift: _nth_before(run, i, right, n)  # noqa: E731
        words = f"each segment takes the state of the segment {shift} before it, not of the one before"
        yield words, Edits(entering=_where(_crosses, taken), inside=True)
        yield f"{words}, and hands it on", Edits(entering=_where(_crosses, taken))
    for n, r in enumerate(owners[1:], 1):
        here = lambda run, i, n=n: _crosses(run, i) and run.split.pieces[i].segment == n  # noqa: E731
        for inside in (True, False):
            on = "" if inside else ", and hands on what comes of it"
            yield (
                f"rank {r} starts segment {n} without the state of rank {owners[n - 1]}{on}",
                Edits(entering=_where(here, _zero), inside=inside),
            )
            for m in range(n - 1):
                taken = lambda run, i, right, m=m: _of_segment(run, i, right, m)  # noqa: E731
                words = f"rank {r} takes the state of rank {owners[m]}, not of rank {owners[n - 1]}{on}"
                yield words, Edits(entering=_where(here, taken), inside=inside)


def _of_segment(run: ChainPass, i: int, right: Tensor, segment: int) -> Tensor:
    """The state that the last piece of a segment has left; zero before the first."""
    pieces = [j for j, p in enumerate(run.split.pieces[:i]) if p.segment == segment]
    return run.left[pieces[-1]] if pieces else torch.zeros_like(right)


def _nth_before(run: ChainPass, i: int, right: Tensor, n: int) -> Tensor:
    """The state left by the n-th segment before that of piece i."""
    return _of_segment(run, i, right, run.split.pieces[i].segment - n)


def _of_documents(case: Case) -> Named:
    """Borders of documents that states cross, or that cut too much."""
    if case.cu_seqlens is None:
        return
    starts = lambda run, i: i > 0 and run.before(i) is None  # noqa: E731
    before = lambda run, i, right: run.left[i - 1]  # noqa: E731
    at_border = lambda run, i: starts(run, i) and run.split.pieces[i].segment != run.split.pieces[i - 1].segment  # noqa: E731
    within = lambda run, i: starts(run, i) and not at_border(run, i)  # noqa: E731
    yield "document borders leak: states go on into the next document", Edits(entering=_where(starts, before))
    yield (
        "document borders leak where a document begins at a shard's first token",
        Edits(entering=_where(at_border, before)),
    )
    yield "document borders leak inside shards", Edits(entering=_where(within, before))
    for words, passed in (
        ("as if no document ended there", _through_all),
        ("past the documents before its last", _past),
    ):
        yield f"document borders leak between ranks: what enters a shard leaves it, {words}", Edits(leaving=passed)
    tail = lambda run, i: _crosses(run, i) and _begins_in(run, i)  # noqa: E731
    yield "a document that begins inside a shard hands no state to the next rank", Edits(entering=_where(tail, _zero))


def _of_shard(run: ChainPass, i: int) -> int | None:
    """The first piece of the segment whose last is piece i, where that is of another document; else None."""
    pieces = run.split.pieces
    first = next(j for j, p in enumerate(pieces) if p.segment == pieces[i].segment)
    is_last = i + 1 == len(pieces) or pieces[i + 1].segment != pieces[i].segment
    return first if is_last and pieces[first].document != pieces[i].document else None


def _through_all(run: ChainPass, i: int, left: Tensor) -> Tensor:
    first = _of_shard(run, i)
    if first is None:
        return left
    state = run.entering(first)
    for call in run.calls[first:]:
        state = call(state)[1]
    return state


def _past(run: ChainPass, i: int, left: Tensor) -> Tensor:
    first = _of_shard(run, i)
    return left if first is None else run.calls[i](run.entering(first))[1]


def _begins_in(run: ChainPass, i: int) -> bool:
    """Whether the document of piece i begins inside the segment before."""
    before = run.split.pieces[i - 1]
    return before.first and before.start > run.split.segments[before.segment].start


def _of_inputs(case: Case) -> Named:
    """Inputs misread before any split."""
    H, Hk = case.shapes.H, case.shapes.Hk
    operation = find(case.operation)
    if Hk < H:
        grouped = [n for n in ("q", "k", "r", "B", "C") if n in operation.inputs(case.shapes, torch.zeros, False)]
        wide = lambda own: own | {n: own[n].repeat(1, 1, H // Hk, 1) for n in grouped}  # noqa: E731
        yield "heads are grouped wrongly: value head h reads key head h mod Hk", Edits(inputs=wide)
    for g in operation.gates:
        for least in (-20.0, -10.0, -5.0, -1.0) if case.hard else ():
            clamp = lambda own, g=g, least=least: own | {g: own[g].clamp(min=least)}  # noqa: E731
            yield f"{g} is clamped at {least:g}", Edits(inputs=clamp)
        without = lambda own, g=g: own | {g: torch.zeros_like(own[g])}  # noqa: E731
        yield f"{g} is ignored", Edits(inputs=without)


def _of_edges(case: Case) -> Named:
    """Right outputs whose gradients are cut, or go to the wrong rank."""
    yield (
        "no gradient goes back from rank to rank",
        Edits(entering=_where(_crosses, lambda run, i, right: right.detach())),
    )
    for n, s in enumerate(case.split.segments[:-1]):
        here = lambda run, i, n=n: _crosses(run, i) and run.split.pieces[i - 1].segment == n  # noqa: E731
        yield (
            f"rank {s.owner} gets no gradient of the state it hands on (segment {n})",
            Edits(entering=_where(here, lambda run, i, right: right.detach())),
        )
    for shift in (2, 3):
        moved = lambda run, i, right, n=shift: _as_if(right, _nth_before(run, i, right, n))  # noqa: E731
        yield (
            f"gradients of states go to the segment {shift} before, not to the one before",
            Edits(entering=_where(_crosses, moved)),
        )
    if case.cu_seqlens is not None:
        starts = lambda run, i: i > 0 and run.before(i) is None  # noqa: E731
        leak = lambda run, i, right: right + run.left[i - 1] - run.left[i - 1].detach()  # noqa: E731
        yield "document borders leak in the backward pass", Edits(entering=_where(starts, leak))
        border = lambda run, i: starts(run, i) and run.split.pieces[i].segment != run.split.pieces[i - 1].segment  # noqa: E731
        yield (
            "document borders leak in the backward pass, where a document begins at a shard's first token",
            Edits(entering=_where(border, leak)),
        )


def _as_if(value: Tensor, source: Tensor) -> Tensor:
    """`value`, whose gradient goes to `source`."""
    return value.detach() + source - source.detach()


def _of_gradients(case: Case) -> Named:
    """Right outputs whose gradients lack a term."""
    if case.states:
        yield "the gradient of the final state is ignored", Edits(dfinal=0.0)
        yield f"the gradient of the final state is counted {case.size} times", Edits(dfinal=float(case.size))
        yield f"the gradient of the final state is counted {1 / case.size:g} times", Edits(dfinal=1 / case.size)

    def passing(call: Callable, own: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        fixed = {n: x.detach() for n, x in own.items()}
        empty = torch.zeros_like(state)
        o, wrote = call(own, state)[0], call(own, empty)[1]
        return o, wrote + call(fixed, state)[1] - call(fixed, empty)[1]

    yield "gradients miss what a rank's tokens do to a state that passes through it", Edits(through=passing)
    for name in find(case.operation).inputs(case.shapes, torch.zeros, False):

        def without(call: Callable, own: dict[str, Tensor], state: Tensor, name: str = name) -> tuple[Tensor, Tensor]:
            fixed = own | {name: own[name].detach()}
            empty = torch.zeros_like(state)
            parts = zip(call(own, empty), call(fixed, state), call(fixed, empty))
            o, left = (a + b - c for a, b, c in parts)
            return o, left

        yield f"the gradient of {name} misses what comes through the state that enters a rank", Edits(through=without)
