"""Writes what the reference says of the recurrences, by their definitions: its table, and its list.

python -m tests.support.recurrence_pages
"""

from __future__ import annotations

import inspect
from pathlib import Path

from ring_la.define import KEY, QUERY, VALUE, Definition
from ring_la.recurrences import RECURRENCES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/users/reference/recurrences.md"


def arguments(definition: Definition) -> str:
    """What a recurrence takes, with the shapes of what is not q, k or v."""
    said = []
    for name, p in inspect.signature(definition.describe).parameters.items():
        if name == "options":
            continue
        argument = definition.arguments.get(name)
        plain = argument in (QUERY, KEY, VALUE)
        said.append(f"`{name}`" if argument is None else name if plain else f"{name} `{argument}`")
        if argument is not None and p.default is None:
            said[-1] += " or None"
    return ", ".join(said)


def table() -> str:
    """A line for each recurrence."""
    bar = r"\|"  # as it is it would end the cell
    lines = [f"| `{r.name}` | {arguments(r)} | {r.equation.replace('|', bar)} |" for r in RECURRENCES]
    return "\n".join(["| function | inputs | recurrence |", "|---|---|---|", *lines])


def listed() -> str:
    """For MkDocs."""
    return "\n\n".join(f"::: {r.describe.__module__}.{r.name}" for r in RECURRENCES)


PARTS = {"table": table, "recurrences": listed}


def parts(name: str) -> tuple[str, str, str]:
    """Before, between and after the marks of a part of the page."""
    head, _, rest = PAGE.read_text().partition(f"<!-- {name} -->")
    between, _, tail = rest.partition(f"<!-- end of {name} -->")
    return head, between.strip(), tail


if __name__ == "__main__":
    for name, text in PARTS.items():
        head, _, tail = parts(name)
        PAGE.write_text(f"{head}<!-- {name} -->\n{text()}\n<!-- end of {name} -->{tail}")
