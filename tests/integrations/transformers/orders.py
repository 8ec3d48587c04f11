"""Every architecture under test in every order of its kinds of layers, on 2 and 3 ranks, dense and packed.

    python -m tests.integrations.transformers.orders [name …]

Hybrids of two kinds get all six mixed orders of three layers, those of more kinds every order of theirs; half of the
checks run on a contiguous layout. Prints a line for each order, and exits with the number of failures.
"""

from __future__ import annotations

import itertools
import signal
import sys
from dataclasses import replace

from transformers.utils import logging

from tests.support.pool import RankError, Ranks
from tests.support.transformers_models import CASES, Case

from .test_models import alone, compare, split


def orders(case: Case) -> list[Case]:
    """The case with its layers in every order; as it is where one argument does not say the order."""
    name = next((n for n in ("layer_types", "layers_block_type") if n in case.options), None)
    if name is None:
        return [case]
    kinds = case.options[name]
    if len(set(kinds)) == 2:
        every = [x for x in itertools.product(dict.fromkeys(kinds), repeat=3) if len(set(x)) == 2]
    else:
        every = sorted(set(itertools.permutations(dict.fromkeys(kinds))))
    return [replace(case, options=case.options | {name: list(x), "num_hidden_layers": len(x)}) for x in every]


def main(names: list[str]) -> int:
    logging.set_verbosity_error()
    ranks, failures, count = Ranks(), 0, 0
    for name in names or CASES:
        for number, case in enumerate(orders(CASES[name])):
            kinds = case.options.get("layer_types", case.options.get("layers_block_type", []))
            try:
                case.make()
            except Exception as e:  # an order the architecture does not allow
                print(f"{name:20} {' '.join(kinds)}: {str(e).strip().splitlines()[-1][:90]}", flush=True)
                continue
            said = []
            for i, (size, packed) in enumerate(itertools.product((2, 3), (False, True))):
                kind = ("zigzag", "contiguous")[(number + i) % 2]
                count += 1
                try:
                    compare(ranks.run(size, split, case, packed, kind), alone(case, packed), case, packed)
                    said.append("equal")
                except (AssertionError, RankError) as e:
                    failures += 1
                    said.append(f"WRONG on {size}, {kind}, packed={packed}: {str(e).strip().splitlines()[-1][:200]}")
            print(f"{name:20} {' '.join(kinds)}: {', '.join(said)}", flush=True)
    ranks.stop()
    print(f"{count} checks, {failures} failed")
    return failures


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
