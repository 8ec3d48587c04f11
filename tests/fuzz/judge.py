"""Cases given to the pool of ranks, and what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.support.pool import RankError, Ranks

from . import in_rank
from .case import Case

TOGETHER = 24
"""Cases that ranks take at once."""


class Verdict(NamedTuple):
    """Of a case: "right", "wrong" or "refused"; what is wrong, by rank, or the refusal; the largest error / bound."""

    case: Case
    kind: str
    words: str
    ratio: float


class Jury:
    """Judges cases on a pool of ranks. `cpu`: seconds that its ranks computed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.cpu = ranks, 0.0

    def one(self, case: Case) -> Verdict:
        return next(self.of([case]))

    def of(self, cases: Iterable[Case]) -> Iterator[Verdict]:
        """Each case's verdict; those of one number of ranks go together."""
        waiting: dict[object, list[Case]] = {}
        for case in cases:
            key = (case.P, case.op == "resume")
            waiting.setdefault(key, []).append(case)
            if len(waiting[key]) == (1 if case.op == "resume" else TOGETHER):
                yield from self._judge(waiting.pop(key))
        for rest in waiting.values():
            yield from self._judge(rest)

    def _judge(self, cases: list[Case]) -> Iterator[Verdict]:
        while cases:
            verdicts = self._try(cases)
            yield from verdicts
            cases = cases[len(verdicts) :]

    def _try(self, cases: list[Case]) -> list[Verdict]:
        """Verdicts of the first cases, at least one; the pool starts anew after one that left ranks apart."""
        try:
            answers = self.ranks.run(cases[0].P, in_rank.judge, [str(c) for c in cases], timeout=240.0)
        except RankError as error:
            if len(cases) > 1:
                return [v for case in cases[: len(cases) // 2] for v in self._try([case])]
            return [Verdict(cases[0], "wrong", f"ranks fail: {str(error).strip()[-2000:]}", float("inf"))]
        self.cpu += sum(cpu for _, cpu in answers)
        verdicts = []
        for case, told in zip(cases, zip(*(told for told, _ in answers))):
            verdicts.append(self._verdict(case, told))
            if any(t.kind == "raised" for t in told) or len({t.kind == "refused" for t in told}) > 1:
                self.ranks.stop()
                break
        return verdicts

    @staticmethod
    def _verdict(case: Case, told: tuple[in_rank.Told, ...]) -> Verdict:
        kinds, words = {t.kind for t in told}, {t.words for t in told}
        ratio = max(t.ratio for t in told)
        if kinds == {"right"}:
            return Verdict(case, "right", "", ratio)
        if kinds == {"refused"} and len({w.split(", got")[0] for w in words}) == 1:  # what came may be a rank's own
            return Verdict(case, "refused", words.pop(), 0.0)
        said = "; ".join(f"rank {r}: {t.kind} {t.words}" for r, t in enumerate(told) if t.kind != "right")
        return Verdict(case, "wrong", said, ratio)
