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


@pytest.mark.parametrize("page", ["docs/moe.md"])
def test_code_runs(page):
    """One block after the other, as in one file."""
    names: dict = {}
    for block in code(page):
        exec(block, names)
    assert torch.isfinite(names["loss"])
    assert names["routing"].load.sum() == pytest.approx(1)


def loop(rank: int) -> tuple[list[str], float]:
    """In the pool, which has joined the ranks: the loop of docs/training.md, two steps of it."""
    (block,) = code("docs/training.md")
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
