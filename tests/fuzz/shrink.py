"""Smaller cases that still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .case import Case

PLAIN = Case("")


def smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, the boldest first."""
    for name in case.how:
        if name not in KEPT:
            yield case.but(how={name: None})
    if case.cu is not None:
        yield case.but(cu=None)
        for i in range(1, len(case.cu) - 1):
            yield case.but(cu=(*case.cu[:i], *case.cu[i + 1 :]))
    for name in (
        "deterministic",
        "validate",
        "multiple_of",
        "scan",
        "attention",
        "transport",
        "kind",
        "B",
        "Hk",
        "groups",
        "K",
        "V",
    ):
        if getattr(case, name) != getattr(PLAIN, name):
            yield case.but(**{name: getattr(PLAIN, name)})
    for P in range(1, case.P):
        yield case.but(P=P)
    for T in sorted({1, 2, 3, case.T // 2, case.T - case.T // 4, case.T - 1}):
        if 1 <= T < case.T:
            yield _cut(case, T)
            if case.cu is not None:
                yield case.but(T=T, cu=tuple(max(c - (case.T - T), 0) for c in case.cu))  # the last tokens
    if case.dtype != "fp64":
        yield case.but(dtype="fp64")


KEPT = ("of", "layers", "index", "topk", "size", "block", "choices", "sizes", "cuts", "parts", "W", "vocab", "other",
        "first", "second", "causal", "window", "rotary", "latent", "order", "levels", "mlp",
        "columns", "width")  # fmt: skip
"""What an operation cannot do without."""


def _cut(case: Case, T: int) -> Case:
    cu = None if case.cu is None else tuple(min(c, T) for c in case.cu)
    how = {}
    if "cuts" in case.how:
        cuts = [c for c in case.how["cuts"] if c < T]
        how = {"cuts": cuts, "parts": case.how["parts"][: len(cuts) + 1]}
    return case.but(T=T, cu=cu, how=how)


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 120) -> Case:
    """The smallest that is found."""
    again = True
    while again and tries > 0:
        again = False
        for candidate in smaller(case):
            tries -= 1
            if fails(candidate):
                case, again = candidate, True
                break
            if tries <= 0:
                break
    return case
