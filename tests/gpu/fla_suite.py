"""fla-core's own tests, run against ours: a plugin of pytest that puts our functions in the place of its operators.

    git clone https://github.com/fla-org/flash-linear-attention CHECKOUT      (and pip install fla-core==0.6.0)
    python -m pytest -n 0 -p tests.gpu.fla_suite -c /dev/null --rootdir CHECKOUT CHECKOUT/tests/ops/test_hgrn.py …

Its tests draw inputs, call an operator, and compare outputs, final states and gradients with a reference, within its
bounds. Where that is another of its kernels (what a test assigns to names of ``ref…``) its own runs, on a GPU, with the
first configuration that runs, but for tests `OF_OPTIONS`. What we have no argument for is a skipped test that says so,
as is what we refuse, by our words, and a test that calls none of the operators in `STAND_INS`. Without a GPU all is on
the CPU.

In the environment, ``FLA_SUITE_OUTCOMES`` is a file that gets a line a test as it ends, whatever becomes of the run;
``FLA_SUITE_DONE`` is such a file of a run before: what passed or was skipped there is left out.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from benchmarks.peers.fla_tuning import settle_for_the_first
from ring_la import ArgumentError, UnsupportedError

from .fla_stand_ins import STAND_INS, StandIn

HARMLESS = {
    "cu_seqlens_cpu", "chunk_size", "chunk_indices", "checkpoint_level", "safe_gate", "disable_recompute", "BT", "BC",
    "lower_bound",
}  # fmt: skip
"""Its keywords that do not change a result."""
NAMES = {"use_qk_l2norm_in_kernel": "use_qk_l2norm"}
OTHERS = {"test_chunk_invalid_chunk_size": "ring_la's has no chunk_size to refuse"}
"""Tests of fla-core's arguments, and why they say nothing of ours."""
OF_OPTIONS = {
    "test_gdn.py": (
        "test_chunk_beta_sigmoid_in_kernel", "test_chunk_state_v_first", "test_chunk_gate_in_kernel",
        "test_chunk_gate_in_kernel_gqa", "test_chunk_gate_in_kernel_varlen",
    ),
    "test_kda.py": ("test_chunk_state_v_first", "test_chunk_use_beta_sigmoid_in_kernel"),
    "test_precond_gated_delta.py": ("test_chunk_transpose_state",),
    "test_precond_kda.py": ("test_chunk_transpose_state",),
    "test_simple_gla.py": ("test_chunk_state_v_first",),
}  # fmt: skip
"""Tests that compare an operator with itself, with and without an option; both sides are ours. Where it is the states'
layout they want equal rounding (1e-4); others' reference fla-core refuses to run on Hopper with Triton 3.4 to 3.7
(its #640)."""
PADDED = (
    "hbt: its reference takes a gradient step for each token that it pads the last mini-batch with; "
    "where none is padded ours is its to 4e-9"
)
DIFFERENCES = {
    "test_ttt.py::test_chunk[B1-T63-": PADDED,
    "test_ttt.py::test_fused_chunk[B1-T63-": PADDED,
    "test_ttt.py::test_chunk_varlen[H2-D64-chunk_size16-cu_seqlens[0, 15]": PADDED,
}
"""Tests that may fail by a difference that was looked into, by what their names hold."""
OUTCOMES = "FLA_SUITE_OUTCOMES"
DONE = "FLA_SUITE_DONE"
REFERENCE = "the reference is another of fla-core's kernels, which need a GPU"


@functools.cache
def _references(file: str) -> tuple[range, ...]:
    """Lines of a test file where a reference is made: assignments to names of ``ref…``."""
    found = []
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Assign):
            names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)} - {"_"}
            if names and all(n.startswith("ref") or n.endswith("_ref") for n in names):
                found.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return tuple(found)


def _for_reference() -> bool:
    """Whether a test, or a function within it, calls for its reference."""
    frame = sys._getframe(2)
    file = frame.f_code.co_filename
    found = False
    while frame is not None and frame.f_code.co_filename == file:
        found = found or any(frame.f_lineno in lines for lines in _references(file))
        if frame.f_code.co_name in OF_OPTIONS.get(Path(file).name, ()):
            return False
        frame = frame.f_back
    return found


def _turned(given: dict[str, Any]) -> bool:
    """Whether states are ``[N, H, V, K]``; its old name of that warns, as upstream."""
    old, new = (given.pop(n, False) for n in ("transpose_state_layout", "state_v_first"))
    if old and new:
        raise ValueError("state_v_first and transpose_state_layout")
    if old:
        warnings.warn("transpose_state_layout", DeprecationWarning, stacklevel=3)
    return bool(old or new)


def _ours(made: StandIn, given: dict[str, Any]) -> Any:
    """Ours, with the arguments given by fla-core's names; those that change nothing are left out."""
    given = {n: x for n, x in given.items() if x is not None}
    if made.as_theirs:
        return made.ours(**{n: x for n, x in given.items() if x is not False})
    parameters = inspect.signature(made.ours).parameters
    taken = {}
    for n, x in given.items():
        name = made.names.get(n, NAMES.get(n, n))
        idle = x is False or (n in HARMLESS and n not in made.names)
        if name in parameters or not idle:
            taken[name] = x
    return made.ours(**taken)


def stand_in(theirs: Callable[..., Any], made: StandIn) -> Callable[..., Any]:
    """Ours, called as theirs; theirs, where a test makes its reference."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def call(*args: Any, **keywords: Any) -> Any:
        if _for_reference():
            return theirs(*args, **keywords) if torch.cuda.is_available() else pytest.skip(REFERENCE)
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        turned = _turned(given)
        if turned and given.get("initial_state") is not None:
            given["initial_state"] = given["initial_state"].mT
        try:
            out = _ours(made, given)
        except (ArgumentError, UnsupportedError) as e:
            pytest.skip(f"ring_la refuses: {e}")
        except TypeError as e:
            if "unexpected keyword argument" not in str(e):
                raise
            pytest.skip(f"ring_la's: {e}")
        if made.as_theirs:
            return (out[0], out[1].mT, *out[2:]) if turned and out[1] is not None else out
        if "output_final_state" not in signature.parameters:
            return out.o if "output_attentions" not in signature.parameters else (out.o, None)
        if not made.spread:
            final = out.final_state
            return out.o, final.mT if turned and final is not None else final
        S, A = (None, None) if out.final_state is None else out.final_state
        return out.o, S.mT if turned and S is not None else S, A

    return call


def _put(package: str, name: str, ours: Callable[..., Any]) -> None:
    """Put a function in the place of another wherever the package has it."""
    top = f"fla.ops.{package}"
    theirs = getattr(importlib.import_module(top), name)
    for place in [m for n, m in sys.modules.items() if n.startswith("fla.ops.") and m is not None]:
        if vars(place).get(name) is theirs:
            setattr(place, name, ours)


def pytest_load_initial_conftests() -> None:
    """Before its conftest asks for the device. Heads that share keys its tests leave to its Triton kernels."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    if not torch.cuda.is_available():
        utils = importlib.import_module("fla.utils")
        utils.device, utils.device_torch_lib = "cpu", torch.cpu


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        settle_for_the_first()
    made = [(s, n) for s in STAND_INS for n in s.functions.split()]
    packages = [importlib.import_module(f"fla.ops.{s.package}") for s, _ in made]
    for (s, name), package in zip(made, packages):
        _put(s.package, name, stand_in(getattr(package, name), s))


def _names(code: CodeType, around: dict[str, Any]) -> Iterator[str]:
    """What a test calls by name, by itself, through functions within it, and through its module's."""
    seen, left = {code}, [code]
    while left:
        at = left.pop()
        yield from at.co_names
        more = [c for c in at.co_consts if isinstance(c, CodeType)]
        more += [around[n].__code__ for n in at.co_names if inspect.isfunction(around.get(n))]
        more = [c for c in more if c not in seen and c.co_filename == code.co_filename]
        seen.update(more)
        left += more


def _ended() -> set[str]:
    """Tests of a run before that need not be run again."""
    file = os.environ.get(DONE)
    lines = [line.split("\t") for line in Path(file).read_text().splitlines()] if file else []
    return {nodeid for outcome, _, nodeid, _ in lines if outcome != "failed"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ended = _ended()
    items[:] = [item for item in items if item.nodeid not in ended]
    ours = {n for s in STAND_INS for n in s.functions.split()}
    for item in items:
        assert isinstance(item, pytest.Function)
        name = item.originalname or item.name
        named = {*_names(inspect.unwrap(item.function).__code__, vars(item.module))}
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named |= {getattr(x, "__name__", "") for x in given if callable(x)}
        if name in OTHERS:
            item.add_marker(pytest.mark.skip(reason=OTHERS[name]))
        elif not named & ours:
            item.add_marker(pytest.mark.skip(reason="it calls none of the operators that have a stand-in"))
        for part, why in DIFFERENCES.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=why))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line of each test, written where xdist's workers report to: a run that is cut short keeps what it had."""
    file = os.environ.get(OUTCOMES)
    if not file or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
    with open(file, "a") as to:
        line = (report.outcome, f"{report.duration:.1f}", report.nodeid, " ".join(str(why).split())[:300])
        to.write("\t".join(line) + "\n")
