"""The code that pages show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def code(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["docs/users/guides/moe.md"])
def test_code_runs(page):
    """One block after the other, as in one file."""
    names: dict = {}
    for block in code(page):
        exec(block, names)
    assert torch.isfinite(names["loss"])
    assert names["routing"].load.sum() == pytest.approx(1)


def headings(page: Path) -> set[str]:
    """What `#` in a link may name: a page's headings as GitHub and MkDocs spell them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in found}


def test_links_lead_somewhere():
    """Links between the pages of docs/ and the others' at the root, and the headings they name."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    assert len(pages) > 20
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            path, _, heading = link.partition("#")
            if ":" in path:
                continue
            to = (page.parent / path) if path else page
            assert to.exists(), f"{page}: {link}"
            assert not heading or heading in headings(to), f"{page}: {link}"


def loop(rank: int) -> tuple[list[str], float]:
    """In the pool, which has joined the ranks: the loop of docs/users/guides/training.md, two steps of it."""
    (block,) = code("docs/users/guides/training.md")
    block, joins = re.subn(r"dist\.(init|destroy)_process_group\(.*\)", "pass", block)
    assert joins == 2, "the loop joins the ranks, and leaves them"
    block, shorter = re.subn(r"range\(10\)", "range(2)", block)
    assert shorter == 1
    names: dict = {}
    exec(block, names)
    return [str(p.device_mesh.shape) for p in names["model"].parameters()][:1], float(names["loss"].detach())


def test_the_training_loop_runs(ranks):
    found = ranks.run(4, loop)
    assert all(shape == ["(4,)"] and 0 < loss < 6 for shape, loss in found), found
