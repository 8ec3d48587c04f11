"""`ring-la serve` on a rank that goes wrong once it has SIGUSR1: ``python -m benchmarks.faults.odd_rank HOW MODEL …``.

HOW: "wedged" stays for ever in the model's next call, alive; "other shapes" has gone on by itself, as a scheduler would
that has lost count: its next piece of a prompt has six tokens more, its next step a sequence less.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import torch

from ring_la.cli.main import main
from ring_la.serving import Hybrid
from ring_la.serving.ranks import What, Word
from ring_la.serving.states import States

TOLD = threading.Event()


def wedge() -> None:
    """Calls of the model that do not return."""
    for name in ("read", "step"):
        call = getattr(Hybrid, name)

        def stuck(self: Hybrid, *given: Any, call: Any = call, **named: Any) -> Any:
            while TOLD.is_set():
                time.sleep(0.1)
            return call(self, *given, **named)

        setattr(Hybrid, name, stuck)


def diverge() -> None:
    """Words that are understood in another way."""
    do = States.do

    def other(self: States, word: Word, *more: Any) -> Any:
        if TOLD.is_set() and word.ids is not None and word.what == What.READ:
            word = word._replace(ids=torch.cat([word.ids, word.ids.new_zeros(6)]))
        elif TOLD.is_set() and word.what in (What.STEP, What.AHEAD) and len(self.batch.rows) > 1:
            self.batch.keep(range(len(self.batch.rows) - 1))
            word = word._replace(ids=None if word.ids is None else word.ids[:-1])
        return do(self, word, *more)

    States.do = other  # type: ignore


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    signal.signal(signal.SIGUSR1, lambda *_: TOLD.set())
    {"wedged": wedge, "other shapes": diverge}[how]()
    sys.exit(main(["serve", *arguments]))
