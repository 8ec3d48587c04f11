"""A few random split calls of every operator; `tests/testing/fuzz.py` runs many."""

from __future__ import annotations

from collections import Counter

from tests.testing import fuzz


def test_random_calls_are_right(ranks):
    seen: Counter = Counter()
    fuzz.run(ranks, 20, seen=seen)
    assert seen["all=cases"] >= 20
