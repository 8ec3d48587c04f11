"""The code that pages show: a page's blocks, and how each is run.

A page's Python blocks run one after the other, as in one file; one whose first line names a file begins anew. Comments
before a block, which no reader sees, say more:

    <!-- code: ranks -->            the page runs on the pool's four ranks
    <!-- code: compiled, WHY -->    the block is compiled, not run
    <!-- code: before
    PYTHON
    -->                             what the text around the block takes for granted; "before, ranks" says both, and
                                    "before, a group of one" has a process group of this process alone
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- code: (?P<said>(?:(?!-->).)*?)\s*-->\n+)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if page.parent.name != "notebook"
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: its language, its text, and what the comment before it says."""

    kind: str
    text: str
    said: str


def blocks(page: str, kind: str) -> list[Block]:
    found = (Block(m["kind"], m["text"], m["said"] or "") for m in BLOCK.finditer((ROOT / page).read_text()))
    return [block for block in found if block.kind == kind]


def on_ranks(page: str) -> bool:
    return any(block.said.partition("\n")[0] in ("ranks", "before, ranks") for block in blocks(page, "python"))


def in_a_group_of_one(page: str) -> bool:
    return any(block.said.startswith("before, a group of one\n") for block in blocks(page, "python"))


def run(page: str) -> int:
    """Run a page's Python in this process, which has joined its ranks already; how many blocks ran."""
    names: dict = {}
    ran = 0
    for i, block in enumerate(blocks(page, "python")):
        where = f"{page}, block {i}"
        if block.text.startswith("# ") and ".py" in block.text.partition("\n")[0]:
            names = {}
        if block.said.startswith("before"):
            exec(compile(block.said.partition("\n")[2], f"{where}, before", "exec"), names)
        elif not (block.said in ("", "ranks") or block.said.startswith("compiled, ")):
            raise AssertionError(f"{where}: code: {block.said}")
        text = re.sub(r"dist\.(init|destroy)_process_group\([^)\n]*\)", "pass", block.text)
        code = compile(text, where, "exec")
        if not block.said.startswith("compiled"):
            exec(code, names)
            ran += 1
    return ran


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks, without comments, long ones joined."""
    text = "\n".join(block.text for block in blocks(page, "bash")).replace("\\\n", " ")
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
