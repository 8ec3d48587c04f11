"""Writes what pages say of the recurrences, by their definitions: the table of README.md, and the reference's list.

python -m tests.support.recurrence_pages
"""

from __future__ import annotations

import inspect
from pathlib import Path

from ring_la.define import KEY, QUERY, VALUE, Definition
from ring_la.recurrences import RECURRENCES

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- recurrences -->", "<!-- end of recurrences -->"


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
    lines = [f"| `{r.name}` | {arguments(r)} | {r.equation} |" for r in RECURRENCES]
    return "\n".join(["| function | inputs | recurrence |", "|---|---|---|", *lines])


def listed() -> str:
    """For MkDocs."""
    return "\n\n".join(f"::: ring_la.{r.name}" for r in RECURRENCES)


PAGES = {"README.md": table, "docs/users/reference/recurrences.md": listed}


def parts(page: str) -> tuple[str, str, str]:
    """Before, between and after the marks of a page."""
    head, _, rest = (ROOT / page).read_text().partition(BEGIN)
    between, _, tail = rest.partition(END)
    return head, between.strip(), tail


if __name__ == "__main__":
    for page, text in PAGES.items():
        head, _, tail = parts(page)
        (ROOT / page).write_text(f"{head}{BEGIN}\n{text()}\n{END}{tail}")
