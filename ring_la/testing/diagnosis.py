"""What is wrong, in words: what came, compared with what each named mistake would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Case, Numbers, numbers
from .mistakes import Mistake, mistakes, right
from .outcome import Tensors, Whole, distances, scales
from .subject import Subject

MOST = 3
"""Mistakes that one case is explained by, at most."""


class Wrong(NamedTuple):
    """A tensor of a rank that is not what it should be."""

    rank: int
    name: str
    error: float


class Explanation(NamedTuple):
    """A mistake in words, and the wrong tensors that it accounts for."""

    words: str
    covers: tuple[Wrong, ...]


class Judged(NamedTuple):
    """A case that was answered: what is wrong, and why; the largest error of each tensor over all ranks."""

    wrong: tuple[Wrong, ...]
    explained: tuple[Explanation, ...]
    errors: dict[str, float]


def examine(subject: Subject, case: Case, got: Sequence[Tensors], known: Sequence[str] = ()) -> Judged:
    """Compare the ranks' tensors with the reference; explain those that are wrong. Mistakes whose words are `known` are
    tried first."""
    drawn = numbers(case)
    truth = right(case, drawn)
    compare = _Compare(subject, case, got, truth)
    errors = compare.errors(truth)
    wrong = [Wrong(r, n, e) for r, each in enumerate(errors) for n, e in each.items() if not e <= subject.bound]
    most = {n: max(each[n] for each in errors if n in each) for n in errors[0]}
    explained = tuple(_explain(compare, case, drawn, wrong, known)) if wrong else ()
    return Judged(tuple(wrong), explained, most)


class _Compare:
    """The tensors of a case that came, beside those that a mistake would give.

    Attributes:
        given: each rank's tensors as they came. got: the same, with parts of shared gradients summed, as rank 0's.
        truth: what `got` should be. parts: of each gradient of something shared, what the ranks' tokens contribute.
    """

    def __init__(self, subject: Subject, case: Case, given: Sequence[Tensors], truth: Whole) -> None:
        self.subject, self.case, self.given, self.split = subject, case, given, case.split
        self.whole, self.parts = subject.shared_gradients == "whole", truth.parts
        self.truth = self.by_rank(truth)
        self.got = [dict(t) for t in given]
        for n in self.parts:
            given_parts = [t[n] for t in given if n in t]
            if self.sums(n) and len(given_parts) == case.size and len({p.shape for p in given_parts}) == 1:
                self.got[0][n] = torch.stack(given_parts).sum(0)
        self.scales = scales(self.truth)

    def sums(self, name: str) -> bool:
        """Whether this is a gradient of which each rank gives its part."""
        return name in self.parts and not self.whole and name != "dinitial_state"

    def by_rank(self, whole: Whole) -> list[Tensors]:
        """What each rank should give."""
        return [whole.on(r, self.split, self.whole) for r in range(self.case.size)]

    def errors(self, whole: Whole) -> list[dict[str, float]]:
        """How far each rank's tensors are from these."""
        return [distances(g, w, self.case, self.scales) for g, w in zip(self.got, self.by_rank(whole))]

    def near(self, wrong: Wrong, expected: Tensor) -> bool:
        """Whether a wrong tensor is what was expected of a mistake."""
        return self.near_to(wrong, self.got[wrong.rank].get(wrong.name), expected)

    def near_to(self, wrong: Wrong, got: Tensor | None, expected: Tensor) -> bool:
        """Whether two tensors of that name are the same."""
        found = distances({wrong.name: got}, {wrong.name: expected}, self.case, self.scales)
        return found[wrong.name] <= self.subject.bound


def _explain(
    c: _Compare, case: Case, drawn: Numbers, wrong: list[Wrong], known: Sequence[str]
) -> Iterator[Explanation]:
    """Mistakes that together account for as much as can be: the one that covers most, and contradicts least, first."""
    plain = list(_grouped(wrong, lambda w: _plain(c, w)))
    left = [w for w in wrong if not any(w in e.covers for e in plain)]
    yield from plain
    tried = list(_tried(c, mistakes(case, drawn), left, known)) if left else []
    tried = [t for t in tried if t[2] <= len(t[1])]  # one that makes more of what is right wrong was not made
    for _ in range(MOST):
        scored = [(sum(w in covers for w in left), -spoilt, -i) for i, (_, covers, spoilt) in enumerate(tried)]
        if not left or not scored or max(scored)[0] == 0:
            break
        words, covers, _ = tried[-max(scored)[2]]
        yield Explanation(words, tuple(w for w in left if w in covers))
        left = [w for w in left if w not in covers]
    yield from _grouped(left, lambda w: _by_number(c, w))


def _tried(
    c: _Compare, all_of_them: Iterable[Mistake], wrong: list[Wrong], known: Sequence[str]
) -> Iterator[tuple[str, set[Wrong], int]]:
    """Each mistake with the wrong tensors it accounts for, and the number of right ones that it would make wrong."""
    in_order = sorted(all_of_them, key=lambda m: m.words not in known)
    for words, gives in in_order:
        whole = gives()
        given = c.by_rank(whole)
        shows = [distances(g, t, c.case, c.scales) for g, t in zip(given, c.truth)]
        covers = {
            w
            for w in wrong
            if shows[w.rank].get(w.name, 0.0) > 2 * c.subject.bound and c.near(w, given[w.rank][w.name])
        }
        of_wrong = {(w.rank, w.name) for w in wrong}
        spoilt = sum(
            e > 2 * c.subject.bound and (r, n) not in of_wrong for r, each in enumerate(shows) for n, e in each.items()
        )
        yield words, covers, spoilt
        if words in known and len(covers) == len(wrong):
            return


def _grouped(left: Iterable[Wrong], words_of: Callable[[Wrong], str]) -> Iterator[Explanation]:
    """One explanation for all wrong tensors of which the same is said."""
    groups: dict[str, list[Wrong]] = {}
    for w in left:
        groups.setdefault(words_of(w), []).append(w)
    for words, covered in groups.items():
        if words:
            yield Explanation(words, tuple(covered))


def _plain(c: _Compare, w: Wrong) -> str:
    """What needs no model: a missing tensor, another shape, numbers that are none."""
    got, want, what = c.got[w.rank].get(w.name), c.truth[w.rank][w.name], in_words(w.name)
    if got is None:
        return f"{what} is missing"
    if got.shape != want.shape:
        return f"{what} has shape {list(got.shape)}, not {list(want.shape)}"
    if bool(got.isnan().any()):
        return f"{what} has NaN"
    return f"{what} has infinities" if bool(got.isinf().any()) else ""


def _by_number(c: _Compare, w: Wrong) -> str:
    """What no mistake accounts for: another rank's tensor, a sum that was not taken, a factor, or else where it is."""
    got, want, what = c.got[w.rank][w.name], c.truth[w.rank][w.name], in_words(w.name)
    if not bool(got.any()):
        return f"{what} is zero"
    for r, truth in enumerate(c.truth):
        other = truth.get(w.name)
        if other is not None and r != w.rank and other.shape == got.shape and c.near(w, other):
            return f"rank {w.rank}'s {what.removeprefix('the ')} is that of rank {r}"
    shared = _of_shared(c, w, what)
    if shared:
        return shared
    for dtype in (torch.bfloat16, torch.float16):
        if c.subject.dtype.itemsize > 2 and torch.equal(got, got.to(dtype).double()):
            return f"{what} is rounded to {dtype}"
    factor = float((got * want).sum() / want.pow(2).sum())
    close = math.isfinite(factor) and c.near(w, factor * want)
    return f"{what} is {_factor(factor, c.case.size)}" if close else _where(c, w, got, want)


def _of_shared(c: _Compare, w: Wrong, what: str) -> str:
    """A gradient of what ranks share: another sum of their parts than it should be."""
    given = [t[w.name] for t in c.given if w.name in t]
    if w.name not in c.parts or len(given) < len(c.given) or any(g.shape != given[0].shape for g in given):
        return ""
    want = c.truth[0][w.name]
    if len(given) > 1 and all(c.near_to(w, g, want) for g in given):
        return f"{what} is whole on every rank, where each should give its part"
    if not c.sums(w.name) and c.near_to(w, torch.stack(given).sum(0), want):
        return f"{what} is each rank's own part, not summed"
    for r, part in enumerate(c.parts[w.name]):
        if all(c.near_to(w, g, part) for g in given) or c.near(w, part):
            return f"{what} is rank {r}'s only"
    return ""


def _factor(factor: float, size: int) -> str:
    for words, value in ((f"counted P = {size} times", size), (f"divided by P = {size}", 1 / size), ("negated", -1)):
        if abs(factor - value) < 1e-3 * abs(value):
            return words
    return f"{factor:.4g} times what it should be"


def _where(c: _Compare, w: Wrong, got: Tensor, want: Tensor) -> str:
    """The tokens and the heads that are wrong."""
    what = in_words(w.name)
    if got.dim() < 3 or got.shape[1] != len(c.split.tokens[w.rank]) or w.name == "final_state":
        return f"{what} is wrong, and no named mistake accounts for it"
    if w.error < max(2**-6, 4 * c.subject.bound):
        return f"{what} is less precise than {c.subject.bound:.0e}: {w.error:.0e}"
    off = (got - want).abs()
    off = off > 0.1 * off.max()
    rows = off.transpose(0, 1).flatten(1).any(1)
    tokens = c.split.tokens[w.rank][rows]
    heads = off.movedim(2, 0).flatten(1).any(1).nonzero().flatten().tolist() if got.dim() > 3 else []
    some = f", heads {heads}" if heads and len(heads) < off.shape[2] else ""
    return f"{what} is wrong at tokens {int(tokens.min())} to {int(tokens.max())} of the sequence{some}"


def in_words(name: str) -> str:
    """A tensor as a sentence names it."""
    if name in ("o", "final_state"):
        return "the output" if name == "o" else "the final state"
    return f"the gradient of {'the initial state' if name == 'dinitial_state' else name[1:]}"
