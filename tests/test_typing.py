"""What type checkers and editors see of the package."""

from __future__ import annotations

import ast
import inspect
import pydoc
import types
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import ring_la
from ring_la import comm, context, layout, nn, scan
from ring_la.context import arguments
from ring_la.kernels import grouped
from ring_la.models import HybridLM
from ring_la.recurrences import FUNCTIONS
from tests.support import recurrence_pages, recurrence_stub

ROOT = Path(__file__).parents[1]


def words(function: object, argument: str) -> set[object]:
    """What an argument may be, by its type."""
    hint = get_type_hints(function)[argument]
    members = get_args(hint) if get_origin(hint) in (types.UnionType,) or "Union" in str(get_origin(hint)) else [hint]
    found: set[object] = set()
    for member in members:
        assert member is type(None) or get_origin(member) is Literal, f"{argument}: {hint}"
        found |= {None} if member is type(None) else set(get_args(member))
    return found


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (ring_la.ContextParallel.__init__, "scan", {"auto", *scan.STRATEGIES}),
        (ring_la.ContextParallel.__init__, "attention", set(context.ATTENTION)),
        (ring_la.ContextParallel.__init__, "transport", set(comm.TRANSPORTS)),
        (ring_la.ContextParallel.__init__, "validate", set(arguments.VALIDATE)),
        (ring_la.ContextParallel.layout, "kind", set(layout.KINDS)),
        (layout.Layout.__init__, "kind", set(layout.KINDS)),
        (ring_la.grouped_gemm, "backend", {"auto", *grouped.BACKENDS}),
        (ring_la.short_conv, "activation", {None, "silu"}),
        (ring_la.attention, "strategy", {None, *context.ATTENTION}),
        (ring_la.attention, "joint", {"front", "rear", "none"}),
    ],
)
def test_choices_are_typed_as_they_are(function, argument, expected):
    assert words(function, argument) == expected


@pytest.mark.parametrize("kind", [*nn.LAYERS.values(), nn.MixtureOfExperts, HybridLM], ids=lambda k: k.__name__)
def test_a_call_of_a_layer_is_typed_as_its_forward(kind):
    """``nn.Module.__call__`` is ``(...) -> Any`` to a type checker; ours has the forward's type, in its eyes alone."""
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("ring_la."))
    assert "    if TYPE_CHECKING:\n        __call__ = forward\n" in source
    assert kind.__call__ is nn.Layer.__mro__[1].__call__, "calls go through the module's hooks"


def test_recurrences_show_type_checkers_their_arguments():
    """The stub is what the functions take, so that a misspelt keyword is found before it runs."""
    assert ast.dump(ast.parse(recurrence_stub.FILE.read_text())) == ast.dump(ast.parse(recurrence_stub.stub())), (
        "run python -m tests.support.recurrence_stub and ruff format"
    )
    assert "use_qk_l2norm: bool = False" in recurrence_stub.FILE.read_text()


@pytest.mark.parametrize("page", recurrence_pages.PAGES)
def test_pages_say_what_the_definitions_say(page):
    _, between, _ = recurrence_pages.parts(page)
    assert between == recurrence_pages.PAGES[page](), "run python -m tests.support.recurrence_pages"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_help_shows_the_arguments(function):
    shown = pydoc.plain(pydoc.render_doc(function))
    assert f"{function.__name__}(" in shown
    assert "layout: 'ShardedLayout | None' = None" in shown
    assert "initial_state: the state before each document" in shown
    assert "(...)" not in shown


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "ring_la/py.typed").exists()
    assert (
        '[tool.setuptools.package-data]\nring_la = ["py.typed", "**/*.pyi"]\n' in (ROOT / "pyproject.toml").read_text()
    )
