"""fla-core's operators beside ours on one GPU, both against fp64: every recurrence that it has.

    pytest -m gpu tests/gpu/test_fla.py -n 12 --gpu-report runs/fla.json     (needs pip install fla-core==0.6.0)

Output and gradients of all, and of those that take them alike packed documents, initial and final states. Ours is held
to the bound of `benchmarks.ops` and to twice fla-core's error; what fla-core cannot do within its seconds (it compiles;
its kernels take the first configuration that runs) is a skipped test that says so, after ours has passed. Times:
`python -m benchmarks.ops`.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ring_la
from benchmarks.errors import relative_error
from benchmarks.ops.bench import LIMIT, SHARED
from benchmarks.ops.cases import CASES, SHARED_INPUTS, Case, Shape, inputs
from benchmarks.ops.measure import errors
from benchmarks.peers.fla_tuning import settle_for_the_first
from benchmarks.peers.ops import PEERS

pytestmark = pytest.mark.gpu
SECONDS = 30
"""For fla-core's side of a test."""
SHAPE = Shape(1, 256, 2, 64, 64)
CU = (0, 130, 131, 256)
SOFTMAX = ("forgetting_attention", "log_linear_attention")
NAMES = [n for n, case in CASES.items() if not case.step and (case.definition is not None or n in SOFTMAX)]
STATES: dict[str, tuple[str, str, dict[str, str]]] = {
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla", {}),
    "gla": ("fla.ops.gla", "chunk_gla", {}),
    "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule", {}),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {}),
    "kda": ("fla.ops.kda", "chunk_kda", {}),
    "comba": ("fla.ops.comba", "chunk_comba", {}),
    "gated_oja_rule": ("fla.ops.gated_oja_rule", "chunk_gated_oja_rule", {"g": "gv"}),
}
"""Where each is, and its names of our arguments."""


settle = functools.cache(settle_for_the_first)


@pytest.fixture(scope="module", autouse=True)
def _peer() -> Iterator[None]:
    """fla-core, which `tests.support.without_fla` keeps from all other tests."""
    kept = {n: sys.modules.pop(n) for n in [*sys.modules] if n == "fla" and sys.modules[n] is None}
    try:
        pytest.importorskip("fla", exc_type=ImportError)
        yield
    finally:
        sys.modules.update(kept)


def within(seconds: int, call: Callable[[], Any]) -> Any:
    """What a call gives; why there is nothing (a string) if it fails or takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        settle()
        return call()
    except Exception as e:  # whatever the peer's
        return f"{type(e).__name__}: {str(e)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def hold(ours: dict[str, float], theirs: Any, record: Callable[[str, object], None]) -> None:
    """Ours within its bounds, and within twice of theirs where there are any."""
    record("errors", {"ring_la": ours, "fla": theirs})
    bound = {n: SHARED if n in SHARED_INPUTS else LIMIT for n in ours}
    assert all(e < bound[n] for n, e in ours.items()), ours
    if isinstance(theirs, str):
        pytest.skip(f"fla-core: {theirs}")
    worse = {n: (e, theirs[n]) for n, e in ours.items() if n in theirs and e > 2 * theirs[n] + 1e-3}
    assert not worse, worse


@pytest.mark.parametrize("name", NAMES)
def test_beside_fla(name, record_property):
    case = CASES[name]
    theirs = within(SECONDS, lambda: PEERS["fla"](name))
    if theirs is None:
        pytest.skip("fla-core has none")
    ours = errors(case, case.ours, SHAPE, "cuda")
    found = theirs if isinstance(theirs, str) else within(SECONDS, lambda: errors(case, theirs, SHAPE, "cuda"))
    hold(ours, found, record_property)


@pytest.mark.parametrize("name", STATES)
def test_states_beside_fla(name, record_property):
    """Three packed documents, each from a state of its own."""
    case = CASES[name]
    x = inputs(case, SHAPE, "cuda", seed=4)
    rng = torch.Generator("cuda").manual_seed(5)
    S = torch.randn(len(CU) - 1, SHAPE.H, SHAPE.K, SHAPE.V, device="cuda", generator=rng).requires_grad_()
    do = torch.randn(1, SHAPE.T, SHAPE.H, SHAPE.V, device="cuda", generator=rng).bfloat16()
    dS = torch.randn(S.shape, device="cuda", generator=rng)

    def results(function: Callable[..., Any], x: dict[str, Tensor], S: Tensor, **more: Any) -> dict[str, Tensor]:
        cu = torch.tensor(CU, device="cuda")
        o, end = function(**x, **more, initial_state=S, output_final_state=True, cu_seqlens=cu)[:2]
        grads = torch.autograd.grad([o, end], [*x.values(), S], [do.to(o.dtype), dS.to(end.dtype)])
        return {"o": o, "S": end, **dict(zip((*(f"d{n}" for n in x), "dS"), grads))}

    true = results(_ours(case), _wide(x), S.detach().double().requires_grad_(), backend="torch")

    def compared(function: Callable[..., Any], names: dict[str, str]) -> dict[str, float]:
        named = {names.get(n, n): t for n, t in x.items()}
        got = results(function, named, S)
        return {n: relative_error(got[f"d{names.get(n[1:], n[1:])}" if n[0] == "d" else n], t) for n, t in true.items()}

    ours = compared(_ours(case), {})
    module, function, names = STATES[name]

    def peer() -> dict[str, float]:
        PEERS["fla"](name)  # switches its guard off
        return compared(getattr(importlib.import_module(module), function), names)

    theirs = within(SECONDS, peer)
    hold(ours, theirs, record_property)


def _ours(case: Case) -> Callable[..., Any]:
    return getattr(ring_la, case.name)


def _wide(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().double().requires_grad_() for n, t in x.items()}
