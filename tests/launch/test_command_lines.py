"""Command lines and configurations that pages, scripts and files show are those that the example reads."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.train_example import CONFIGS, ROOT, parsed

SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_configurations_are_the_example_s(config):
    from ring_la.training import StepFlops

    found = parsed([f"--config={config}"])
    size = StepFlops(found.model.config(257)).parameters
    said = re.search(r"([\d.]+) B parameters", config.read_text())
    assert said is None or abs(size / 1e9 - float(said[1])) < 0.006


def test_a_first_look_takes_minutes():
    """What the small configuration asks for, at the 8e10 operations a second that two cores of a CPU gave it."""
    from ring_la.training import StepFlops

    found, text = parsed([f"--config={ROOT / 'examples/configs/small.yaml'}"]), CONFIGS[-1].read_text()
    assert "minutes on two CPU cores" in text
    shape, length = found.model.config(257), found.data.seq_len
    assert found.run.steps * StepFlops(shape)([0, length]) * found.data.sequences / 8e10 < 5 * 60
    assert found.optimizer.warmup <= found.run.steps / 2


def test_command_lines_in_comments_and_docs_are_the_example_s():
    """Every option that a page or a script shows is one."""
    pages = [*SCRIPTS, ROOT / "docs/users/guides/training.md", ROOT / "examples/train_hybrid.py", *CONFIGS]
    seen = 0
    for page in pages:
        text = page.read_text().replace("\\\n#", "").replace("\\\n", "")
        for line in text.splitlines():
            shown = re.search(
                r"(?:train_hybrid\.py|train\.sh|train_nodes\.sh|train\.sbatch) (--(?!standalone)\S.*)", line
            )
            if shown and '"$@"' not in line:
                words = shlex.split(shown[1], comments=True)
                words = words[2:] if words[0] == "--check" else words
                assert parsed([w for w in words if w != "..."]), line
                seen += 1
    assert seen >= 4
