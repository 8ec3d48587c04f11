"""Random split calls of every public operator, judged by the kit: ``python -m tests.testing.fuzz 10000 [--seed 0]``.

A failure is shrunk by hypothesis to one line, the case, which runs again as it stands.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import ring_la
from ring_la.testing import Call, Subject
from ring_la.testing.cases import Case
from ring_la.testing.diagnosis import examine
from ring_la.testing.operations import OPERATIONS, Shapes
from ring_la.testing.rank import Answer, answer
from tests.support.pool import Ranks, group

SCANS = ("ring", "pipelined", "all_gather", "doubling", "all_to_all")
ATTENTION = ("auto", "ring", "all_gather", "ulysses")
MODES = ("auto", "chunk", "recurrent")


class Drawn(NamedTuple):
    """A case, and how ring_la is to run it."""

    case: Case
    scan: str
    attention: str
    mode: str

    def __str__(self) -> str:
        c = self.case
        how = self.attention if c.operation == "attention" else f"{self.scan}, {self.mode}"
        numbers = (
            f"{tuple(c.shapes)}, cu={c.cu_seqlens}, states={c.states}, hard={c.hard}, {c.dtype}, {dict(c.options)}"
        )
        return f"{c.operation}, {c.kind}, P={c.size}, {how}, {numbers}, seed={c.seed}"


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Any call that is not refused for its shapes alone."""
    name = draw(st.sampled_from(sorted(OPERATIONS)))
    attention, P = name == "attention", draw(st.integers(1, 4))
    T, Hk = draw(st.integers(1, 60)), draw(st.integers(1, 2))
    packed = draw(st.booleans())
    cu = (0, *sorted(draw(st.lists(st.integers(0, T), max_size=5))), T) if packed else None
    B = 1 if packed else draw(st.integers(1, 2))
    shapes = Shapes(B, T, Hk * draw(st.integers(1, 2)), Hk, draw(st.integers(1, 6)), draw(st.integers(1, 5)))
    kind = draw(st.sampled_from(["contiguous", "zigzag", *(["striped"] if attention else [])]))
    options: dict = {}
    if attention:
        options["causal"] = draw(st.booleans())
        left, right = draw(st.integers(-1, 20)), draw(st.integers(-1, 20))
        options["window"] = (left, -1 if options["causal"] else right)
        options["softcap"] = draw(st.sampled_from([0.0, 2.0]))
    elif name not in ("short_conv", "token_shift"):
        options["scale"] = draw(st.sampled_from([None, 1.0, 0.3]))
    case = Case(
        "fuzz", name, shapes, P, kind, draw(st.sampled_from([torch.float64, torch.float32])), cu,
        tuple(options.items()), not attention and draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 999)),
    )  # fmt: skip
    return Drawn(case, draw(st.sampled_from(SCANS)), draw(st.sampled_from(ATTENTION)), draw(st.sampled_from(MODES)))


@functools.lru_cache
def context(P: int, scan: str, attention: str) -> ring_la.ContextParallel:
    """In a rank: one ContextParallel for each group and strategies."""
    return ring_la.ContextParallel(group(P), scan=scan, attention=attention)


def split(call: Call, operation: str, scan: str, attention: str, mode: str) -> object:
    """ring_la's own call."""
    cp = context(call.size, "ring", attention) if operation == "attention" else context(call.size, scan, "ring")
    layout = cp.layout(call.seq_len, call.kind, cu_seqlens=call.cu_seqlens)
    more: dict = {"output_final_state": True} if call.output_final_state else {}
    if operation not in ("attention", "short_conv", "token_shift"):
        more["mode"] = mode
    return getattr(ring_la, operation)(**call.tensors, **call.options, **more, layout=layout)


def in_rank(rank: int, subject: Subject, case: Case) -> Answer:
    return answer(rank, group(case.size), torch.device("cpu"), subject, case)


def fault(ranks: Ranks, one: Drawn) -> str:
    """What is wrong with a case, in words; empty: nothing, or all ranks refuse it with an error of ring_la's."""
    how = {"scan": one.scan, "attention": one.attention, "mode": one.mode}
    run = functools.partial(split, operation=one.case.operation, **how)
    subject = Subject(
        run, one.case.operation, dtype=one.case.dtype, tolerance=1e-8 if one.case.dtype.itemsize > 4 else 2e-3
    )
    answers = ranks.run(one.case.size, in_rank, subject, one.case)
    errors = {a.error for a in answers}
    if errors == {""}:
        judged = examine(subject, one.case, [a.tensors for a in answers])
        return "; ".join(e.words for e in judged.explained)
    refused = len(errors) == 1 and answers[0].error.startswith(("UnsupportedError", "ArgumentError"))
    return "" if refused else "; ".join(sorted(errors))


def run(ranks: Ranks, count: int, seed: int | None = None, seen: Counter | None = None) -> None:
    """Judge `count` cases; the first fault, shrunk, is an AssertionError. `seen` counts them by dimension.

    `seed` None: the same cases every time.
    """

    def check(one: Drawn) -> None:
        if seen is not None:
            c = one.case
            packed = "packed" if c.cu_seqlens else "rows"
            seen.update(f"{k}={v}" for k, v in {
                "operation": c.operation, "P": c.size, "kind": c.kind, "dtype": c.dtype, "documents": packed,
                "states": c.states, "hard": c.hard, "scan": one.scan, "mode": one.mode, "all": "cases",
            }.items())  # fmt: skip
        wrong = fault(ranks, one)
        assert not wrong, f"{one}: {wrong}"

    how = settings(
        max_examples=count, deadline=None, database=None, derandomize=seed is None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    test = how(given(drawn())(check))
    (test if seed is None else seeded(seed)(test))()


def main() -> None:
    """A long run, in rounds, with what was seen by dimension."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, seen, start = Ranks(), Counter(), time.time()
    for n in range(0, options.count, 500):
        run(ranks, min(500, options.count - n), options.seed + n, seen)
        print(f"{seen['all=cases']} cases in {time.time() - start:.0f} s", flush=True)
    ranks.stop()
    print("\n".join(f"{k} {n}" for k, n in sorted(seen.items())))


if __name__ == "__main__":
    main()
