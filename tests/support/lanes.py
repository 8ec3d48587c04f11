"""Lanes, a plugin of pytest: every test is in exactly one, by what it uses, and ``-m LANE`` runs it.

    gpu          marked so: needs GPUs, or the compilers for them (tests/support/gpu.py)
    distributed  takes the fixture `ranks`; or starts ranks of its own, and is marked so
    interpreter  its module calls `interpreted`: Triton's kernels run on the CPU
    slow         marked so: one process, but Transformers' models, compilers or scripts that take seconds each
    fast         all others: one process, plain PyTorch

A test in two of these is in the upper one.
"""

from __future__ import annotations

import pytest

from tests.support.interpreter import interpreted

LANES = ("gpu", "distributed", "interpreter", "slow", "fast")


def used(item: pytest.Item) -> str:
    """The lane of what a test uses, as far as that can be seen."""
    if "ranks" in item.fixturenames:
        return "distributed"
    return "interpreter" if vars(item.module).get("interpreted") is interpreted else "fast"


def lane(item: pytest.Item) -> str:
    """The one lane of a test: what it says by a marker, or what it uses."""
    said = [name for name in LANES if item.get_closest_marker(name)]
    seen = used(item)
    if len(said) > 1 or (said and LANES.index(said[0]) > LANES.index(seen)):
        raise pytest.UsageError(f"{item.nodeid}: marked {' and '.join(said)}, and what it uses is {seen}: say one lane")
    return said[0] if said else seen


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(lane(item))
