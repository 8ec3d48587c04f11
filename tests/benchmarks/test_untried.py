"""What `benchmarks.tuning.untried` compares: every arm runs, and near its truth."""

from __future__ import annotations

import pytest

from tests.support.interpreter import interpreted

interpreted()

from benchmarks.ops.cases import Shape  # noqa: E402
from benchmarks.tuning.untried import QUESTIONS, errors  # noqa: E402


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_arm_is_near_its_truth(name: str) -> None:
    question = QUESTIONS[name]
    shape = Shape.parse(question.shapes[0])._replace(T=5, K=8, V=8)
    for arm in question.arms:
        found = errors(question, arm, shape, "cpu")
        assert all(e < 2e-2 for e in found.values()), (arm.name, found)
