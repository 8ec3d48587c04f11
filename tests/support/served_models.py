"""Writes what the guides say of models of Transformers that are decoded alone or not served, by what a server does.

python -m tests.support.served_models
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ring_la import UnsupportedError
from ring_la.integrations.transformers.mixers import UNCACHED, uncached
from ring_la.serving.model import rehearse
from ring_la.serving.pretrained import Pretrained
from tests.support.transformers_models import CASES

GUIDES = Path(__file__).parents[2] / "docs/users/guides"
ALONE, REFUSED, NOWHERE = "decoded one at a time", "refused on several ranks", "refused on one rank, too"


def way(name: str) -> str | None:
    """What a server on one rank does with a model under test; None: its sequences are decoded side by side."""
    model = Pretrained(CASES[name].make(), None)
    try:
        rehearse(model, None)
    except UnsupportedError:
        return NOWHERE
    return None if model.flexible else ALONE


def refused() -> list[str]:
    """Models that leave no cache after a prompt that several ranks have read."""
    return [name for name in CASES if uncached(CASES[name].make()) is not None]


def words(names: Iterable[str]) -> str:
    """Names as the pages write them."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def table(ways: dict[str, str | None]) -> str:
    """Of all models under test."""
    rows = {which: [name for name in ways if ways[name] == which] for which in (ALONE, NOWHERE)}
    rows = {ALONE: rows[ALONE], REFUSED: refused(), NOWHERE: rows[NOWHERE]}
    return "\n".join(["  | | |", "  |---|---|", *(f"  | {which} | {words(names)} |" for which, names in rows.items())])


def classes() -> str:
    """Those without a cache, for the page of `parallelize`."""
    return words(UNCACHED)


PARTS = {"served": GUIDES / "serving.md", "uncached": GUIDES / "transformers.md"}


def parts(name: str) -> tuple[str, str, str]:
    """Before, between and after the marks of a part of its page."""
    head, _, rest = PARTS[name].read_text().partition(f"<!-- {name} -->")
    between, _, tail = rest.partition(f"<!-- end of {name} -->")
    return head, between.strip("\n"), tail


if __name__ == "__main__":
    import tests.support.without_fla  # noqa: F401

    logging.getLogger("ring_la").setLevel(logging.ERROR)
    for name, text in (("served", table({case: way(case) for case in CASES})), ("uncached", classes())):
        head, _, tail = parts(name)
        PARTS[name].write_text(f"{head}<!-- {name} -->\n{text}\n<!-- end of {name} -->{tail}")
