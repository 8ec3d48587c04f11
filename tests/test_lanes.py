"""Lanes: every test is in exactly one, and in the one it should be."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support import interpreter
from tests.support.lanes import LANES, lane
from tests.support.order import LONGEST


def item(*marked: str, fixtures: tuple[str, ...] = (), interpreted: object = None) -> SimpleNamespace:
    module = ModuleType("test_it")
    module.interpreted = interpreted
    find = {name: name for name in marked}.get
    return SimpleNamespace(nodeid="test_it", fixturenames=fixtures, module=module, get_closest_marker=find)


def test_every_collected_test_is_in_one_lane(request):
    for each in request.session.items:
        named = {m.name for m in each.iter_markers()} & set(LANES)
        assert len(named) == 1, f"{each.nodeid}: {sorted(named)}"


def test_a_lane_follows_from_what_a_test_uses():
    assert lane(item()) == "fast"
    assert lane(item("slow")) == "slow"
    assert lane(item(fixtures=("tmp_path", "ranks"))) == "distributed"
    assert lane(item(interpreted=interpreter.interpreted)) == "interpreter"
    assert lane(item(fixtures=("ranks",), interpreted=interpreter.interpreted)) == "distributed"
    assert lane(item("distributed")) == "distributed"
    assert lane(item("gpu", fixtures=("ranks",))) == "gpu"
    assert lane(item(interpreted=lambda: True)) == "fast"  # another function of that name


@pytest.mark.parametrize(
    "wrong", [item("slow", fixtures=("ranks",)), item("slow", "distributed"), item("fast", fixtures=("ranks",))]
)
def test_a_marker_that_hides_what_a_test_uses_is_refused(wrong):
    with pytest.raises(pytest.UsageError, match=r"^test_it: marked .+ say one lane$"):
        lane(wrong)


def test_the_files_that_go_first_are_there():
    assert all((Path(__file__).parents[1] / name).is_file() for name in LONGEST)
    assert len(set(LONGEST)) == len(LONGEST)
