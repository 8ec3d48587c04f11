"""`judge`: a subject on all its cases, and the report of what is wrong."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ..checks import check_above_zero, is_int
from ..errors import ArgumentError, RingLAError, describe_tensor
from .cases import Case, cases
from .diagnosis import Explanation, examine
from .processes import Processes
from .rank import RankAnswer, answer
from .subject import Subject

Verdict = Literal["right", "wrong", "refused", "uneven refusal", "silent"]


class RankPool(Protocol):
    """Something that runs a task on ranks."""

    def run(self, task: Callable[..., RankAnswer], *args: object) -> list[RankAnswer]:
        """What ``task(rank, group, device, *args)`` answers on each rank."""
        ...


class Finding(NamedTuple):
    """A case and what came of it.

    Attributes:
        verdict: "right"; "wrong"; "refused" (every rank raised the same error); "uneven refusal" (some ranks raised, or
            raised something else); "silent" (a rank hangs or died).
        words: what is wrong, a sentence each; what was raised.
        errors: the largest relative error of each tensor.
        trace: the ranks' own errors, or where they hang.
    """

    case: Case
    verdict: Verdict
    words: tuple[str, ...] = ()
    errors: dict[str, float] = {}
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.case}" + "".join(f"\n         {line}" for line in self.words)


@dataclass(frozen=True)
class Report:
    """All findings of a subject."""

    subject: Subject
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether something is right, and nothing wrong, uneven or silent; a plain refusal of a case is no fault."""
        verdicts = {f.verdict for f in self.findings}
        return "right" in verdicts and verdicts <= {"right", "refused"}

    @property
    def words(self) -> tuple[str, ...]:
        """Everything that is wrong, each sentence once, the most frequent first."""
        wrong = Counter(w.split(" [")[0] for f in self.findings if f.verdict == "wrong" for w in f.words)
        return tuple(w for w, _ in wrong.most_common())

    def __str__(self) -> str:
        counts = Counter(f.verdict for f in self.findings)
        told = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        head = f"{self.subject.name} as {self.subject.operation}: {len(self.findings)} cases, {told}"
        return "\n".join([head, *(f"  {f}" for f in self.findings if f.verdict != "right")])

    def check(self) -> None:
        """Raise what is wrong.

        Raises:
            WrongError: with the report.
        """
        if not self.ok:
            raise WrongError(str(self))


class WrongError(RingLAError, AssertionError):
    """An implementation does not compute what it claims."""


def judge(
    subject: Subject,
    *,
    sizes: Sequence[int] = (1, 2, 3),
    device: str = "cpu",
    timeout: float = 60.0,
    seed: int = 0,
    only: Sequence[str] | None = None,
    ranks: RankPool | None = None,
    show: Callable[[Finding], None] = lambda finding: None,
) -> Report:
    """Run a subject on all its cases, forward and backward, beside fp64 loops, and say what is wrong.

    Args:
        subject: the implementation.
        sizes: numbers of ranks to try. device: "cpu" (gloo), "cuda" (NCCL, a GPU a rank), or one GPU, "cuda:0", which
            all ranks share (NCCL over sockets: as right, and slow).
        timeout: seconds in which a call is answered; its ranks are killed and started anew after that.
        seed: of all numbers. only: names of cases to run; None: all.
        ranks: what runs the ranks; None: processes of their own, spawned: a script needs the guard
            ``if __name__ == "__main__":``.
        show: is given each finding as it comes.

    Raises:
        ArgumentError: a bad argument. PeerError: the ranks could not be started.
    """
    check_above_zero("timeout", timeout)
    if not is_int(seed):
        raise ArgumentError("seed", "an int", describe_tensor(seed))
    if only is not None and (isinstance(only, str) or not isinstance(only, Sequence)):
        raise ArgumentError("only", "a list of names of cases, or None", describe_tensor(only))
    if not callable(show):
        raise ArgumentError("show", "a function of a Finding", describe_tensor(show))
    _check(subject, sizes, ranks)
    findings: list[Finding] = []
    known: dict[str, None] = {}
    for size in sizes:
        chosen = [c for c in cases(subject, size, seed) if only is None or c.name in only]
        with _running(ranks, size, device, timeout) as running:
            for finding in _judged(subject, chosen, running, known):
                findings.append(finding)
                show(finding)
    return Report(subject, tuple(findings))


def _check(subject: object, sizes: object, ranks: RankPool | None) -> None:
    """Refuse what no rank could be given."""
    if not isinstance(subject, Subject):
        raise ArgumentError("subject", "a Subject", describe_tensor(subject))
    numbers = isinstance(sizes, Sequence) and sizes and all(is_int(n, 1) for n in sizes)
    if not numbers:
        raise ArgumentError("sizes", "numbers of ranks, each an int ≥ 1", repr(sizes))
    for name, part in (("run", subject.run), *(("kinds", kind) for kind in subject.kinds)):
        try:
            pickle.dumps(part)
        except Exception as error:  # of any kind: a lambda, a function within another, a captured tensor
            if ranks is None:
                raise ArgumentError(
                    name, "what other processes can import: a function of a module", repr(part)
                ) from error


def _running(ranks: RankPool | None, size: int, device: str, timeout: float) -> AbstractContextManager[RankPool]:
    return Processes(size, device, timeout) if ranks is None else nullcontext(ranks)


def _judged(subject: Subject, chosen: Iterable[Case], ranks: RankPool, known: dict[str, None]) -> Iterable[Finding]:
    for case in chosen:
        answers = ranks.run(answer, subject, case)
        if any(a.error or a.silent for a in answers):
            yield _unanswered(case, answers)
            continue
        judged = examine(subject, case, [a.tensors for a in answers], tuple(known))
        known.update(dict.fromkeys(e.words for e in judged.explained))
        words = tuple(_sentence(e) for e in judged.explained)
        yield Finding(case, "wrong" if judged.wrong else "right", words, judged.errors)


def _unanswered(case: Case, answers: Sequence[RankAnswer]) -> Finding:
    """Ranks that raised, hang or died, in words."""
    traces = "".join(f"--- rank {r} ---\n{a.trace}" for r, a in enumerate(answers) if a.trace)
    if len({a.error for a in answers}) == 1 and not any(a.silent for a in answers):
        return Finding(case, "refused", (_short(answers[0].error),), trace=traces)
    words = tuple(f"rank {r}: {_short(a.error) or 'answered'}{_stands(a)}" for r, a in enumerate(answers))
    silent = any(a.silent for a in answers)
    return Finding(case, "silent" if silent else "uneven refusal", words, trace=traces)


def _stands(a: RankAnswer) -> str:
    """The innermost line of where a silent rank stands."""
    lines = [line.strip() for line in a.trace.splitlines() if line.strip().startswith("File")]
    return f", in {lines[0]}" if a.silent and lines else ""


def _short(error: str) -> str:
    return error.splitlines()[0][:300] if error else ""


def _sentence(e: Explanation) -> str:
    """A mistake with what it accounts for."""
    names = dict.fromkeys(w.name for w in e.covers)
    on = sorted({w.rank for w in e.covers})
    return f"{e.words} [{', '.join(names)} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}]"
