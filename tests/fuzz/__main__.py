"""``python -m tests.fuzz --cases 10000 --seed 0 --record FILE``, or ``--case '{…}'`` to run one again."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from random import Random

import torch

if not torch.cuda.is_available():  # before anything imports Triton: messages by mailboxes are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.pool import Ranks

from .case import Case
from .draw import draw
from .judge import Jury
from .record import Record
from .shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case: a run in parts")
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--small", action="store_true", help="short cases alone, as in the tests")
    parser.add_argument("--op", help="cases of this operation alone")
    parser.add_argument("--record", type=Path, help="a JSON file to write, or of the cases before --first, to add to")
    parser.add_argument("--as-drawn", action="store_true", help="print failures without shrinking them")
    parser.add_argument("--stop", type=int, default=5, help="failures after which a run ends")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks()
    try:
        if options.case:
            verdict = Jury(ranks).one(Case.parse(options.case))
            print(verdict.kind, f"{verdict.ratio:.3g}", verdict.words)
            return verdict.kind == "wrong"
        return _run(options, Jury(ranks))
    finally:
        ranks.stop()


def _run(options: argparse.Namespace, jury: Jury) -> int:
    record = Record(options.seed, options.first, options.record)
    drawn = (case_of(options.seed, n, options.small) for n in range(options.first, options.first + options.cases))
    for verdict in jury.of(c for c in drawn if options.op in (None, c.op)):
        record.add(verdict)
        if verdict.kind == "wrong":
            small = verdict.case
            if not options.as_drawn:
                small = shrink(small, lambda c: jury.one(c).kind == "wrong")
                verdict = jury.one(small)
            record.failures.append({"case": str(small), "words": verdict.words.split("Traceback")[0].strip()})
            print(f"{small.line}\n    {verdict.words[:3000]}", flush=True)
            record.write(jury)
            if len(record.failures) >= options.stop:
                break
        if record.count % 240 == 0:
            print(record.progress(jury), flush=True)
            record.write(jury)
    print(record.progress(jury))
    record.write(jury)
    return bool(record.failures)


def case_of(seed: int, number: int, small: bool = False) -> Case:
    """The n-th case of a seed, whichever others run."""
    return draw(Random(f"{seed}/{number}"), small)


if __name__ == "__main__":
    sys.exit(main())
