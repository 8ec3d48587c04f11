"""What type checkers and editors see of the package."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import pydoc
import re
import shutil
import subprocess
import sys
import textwrap
import types
import zipfile
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import ring_la
from ring_la import comm, context, layout, nn, scan
from ring_la.context import arguments
from ring_la.kernels import grouped
from ring_la.models import HybridLM
from ring_la.recurrences import FUNCTIONS
from ring_la.softmax.backends import BACKENDS as softmax_backends
from ring_la.softmax.backends import CHOSEN
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
        (ring_la.attention, "backend", {None, "reference", *softmax_backends}),
        (ring_la.sparse_attention, "backend", {None, "reference", *CHOSEN}),
        (ring_la.mla, "backend", {None, "reference", *softmax_backends, *CHOSEN}),
        (ring_la.attention, "joint", {"front", "rear", "none"}),
    ],
)
def test_choices_are_typed_as_they_are(function, argument, expected):
    assert words(function, argument) == expected


def strict() -> list[str]:
    """The modules that pyproject.toml has mypy look at strictly."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.partition("# what users call: strict\n")[2].partition("]\n")[0]
    return re.findall(r'"([\w.*]+)"', block)


def test_what_the_reference_names_is_checked_strictly():
    """Every module that something documented is defined in, but for those of the server."""
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    pages = (ROOT / "docs/users/reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (ring_la[\w.]*)$", page.read_text(), re.MULTILINE)]
    documented = [pkgutil.resolve_name(name) for name in names]
    modules = {x.__name__ if isinstance(x, types.ModuleType) else x.__module__ for x in documented}
    assert len(modules) > 60
    known = ["ring_la.serving.*", *strict()]
    held = {m for m in modules for n in known if m == n or (n.endswith(".*") and f"{m}.".startswith(n[:-1]))}
    assert not modules - held


@pytest.mark.parametrize("kind", [*nn.LAYERS.values(), nn.MixtureOfExperts, HybridLM], ids=lambda k: k.__name__)
def test_a_call_of_a_layer_is_typed_as_its_forward(kind):
    """``nn.Module.__call__`` is ``(...) -> Any`` to a type checker; ours has the forward's type, in its eyes alone."""
    for base in (base for base in kind.__mro__ if base.__module__.startswith("ring_la.")):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        found = {f.name: ast.unparse(f.args) + ast.unparse(f.returns or f) for f in functions}
        assert found.get("forward") == found.get("__call__"), base
    assert kind.__call__ is nn.Layer.__mro__[1].__call__, "calls go through the module's hooks"


def test_recurrences_show_type_checkers_their_arguments():
    """The stub is what the functions take, so that a misspelt keyword is found before it runs."""
    assert ast.dump(ast.parse(recurrence_stub.FILE.read_text())) == ast.dump(ast.parse(recurrence_stub.stub())), (
        "run python -m tests.support.recurrence_stub and ruff format"
    )
    assert "use_qk_l2norm: bool = False" in recurrence_stub.FILE.read_text()


@pytest.mark.parametrize("part", recurrence_pages.PARTS)
def test_the_reference_says_what_the_definitions_say(part):
    _, between, _ = recurrence_pages.parts(part)
    assert between == recurrence_pages.PARTS[part](), "run python -m tests.support.recurrence_pages"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_help_shows_the_arguments(function):
    shown = pydoc.plain(pydoc.render_doc(function))
    assert f"{function.__name__}(" in shown
    assert "layout: 'ShardedLayout | None' = None" in shown
    assert "initial_state: the state before each document" in shown
    assert "(...)" not in shown


PROGRAM = """\
import torch
import ring_la
from ring_la.nn import GatedDeltaNet

cp = ring_la.ContextParallel()
q, g = torch.zeros(1, 8, 4, 32), torch.zeros(1, 8, 4)
ring_la.gated_delta_rule(q, q, q, g, g, initial_sate=None)
layout = cp.layout(16, kind="zig-zag")
GatedDeltaNet(32, 4)(q, layout="zigzag")
out: ring_la.LinearAttentionOutput = ring_la.kda(q, q, q, q, g, layout=cp.layout(16), mode="chunk")
"""
MISTAKES = {7, 8, 9}
"""A misspelt keyword, a word that is no choice, something else for a layout; the last line is right."""


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def checked(file: Path, *command: str) -> str:
    """What a checker says of a file, by a process outside the checkout that finds ring_la as users do: on the path."""
    paths = {"MYPYPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=file.parent, env=os.environ | paths, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_mypy_finds_the_mistakes_of_a_program(program):
    """Without torch's own types, which take mypy most of a minute to read: none of the mistakes needs them."""
    pytest.importorskip("mypy")
    settings = program.parent / "mypy.ini"
    settings.write_text(
        "[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n"
    )
    said = checked(program, "mypy", "--config-file", str(settings), "--no-error-summary", str(program))
    assert {int(line) for line in re.findall(r"program\.py:(\d+): error", said)} == MISTAKES, said
    assert 'Unexpected keyword argument "initial_sate" for "gated_delta_rule"; did you mean "initial_state"?' in said


@pytest.mark.slow
def test_pyright_finds_the_mistakes_of_a_program(program):
    pytest.importorskip("pyright")
    settings = {"extraPaths": [str(ROOT)], "include": ["program.py"]}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    said = checked(program, "pyright", "--outputjson", "--pythonpath", sys.executable)
    found = json.loads(said)["generalDiagnostics"]
    assert {d["range"]["start"]["line"] + 1 for d in found if d["severity"] == "error"} == MISTAKES, found


@pytest.mark.slow
def test_an_editable_install_is_a_path(tmp_path):
    """Editors and type checkers follow a path; an import hook, setuptools' other way, they do not."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "ring_la").mkdir()
    (tmp_path / "ring_la/__init__.py").write_text('__version__ = "0"\n')
    build = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = [name for name in wheel.namelist() if "dist-info" not in name]
        assert [Path(name).suffix for name in inside] == [".pth"]
        assert Path(wheel.read(inside[0]).decode().strip()).resolve() == tmp_path.resolve()


def test_flags_are_given_by_name():
    """A call with three bare Trues says nothing."""
    public = [getattr(ring_la, name) for name in ring_la.__all__ if inspect.isfunction(getattr(ring_la, name))]
    methods = [f for kind in nn.LAYERS.values() for f in (kind.__init__, kind.forward)]
    for function in (*public, *methods, ring_la.ContextParallel.__init__, ring_la.ContextParallel.layout):
        for p in inspect.signature(function).parameters.values():
            assert not isinstance(p.default, bool) or p.kind is p.KEYWORD_ONLY, f"{function.__qualname__}: {p.name}"


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "ring_la/py.typed").exists()
    assert (
        '[tool.setuptools.package-data]\nring_la = ["py.typed", "**/*.pyi"]\n' in (ROOT / "pyproject.toml").read_text()
    )
