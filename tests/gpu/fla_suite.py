"""fla-core's own tests, run against ours: a plugin of pytest that puts our functions in the place of its operators.

    git clone https://github.com/fla-org/flash-linear-attention CHECKOUT      (and pip install fla-core==0.6.0)
    python -m pytest -n 0 -p tests.gpu.fla_suite -c /dev/null --rootdir CHECKOUT CHECKOUT/tests/ops/test_hgrn.py …

Its tests draw inputs, call an operator, and compare outputs, final states and gradients with its reference, within its
bounds. Operators whose reference in the tests is another of its kernels keep that one, and need a GPU. What we have no
argument for is a skipped test that says so; tests of parts of its kernels are its own. Without a GPU all is on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import ring_la
from ring_la.integrations import fla as adapters

HARMLESS = {
    "cu_seqlens_cpu", "chunk_size", "chunk_indices", "checkpoint_level", "safe_gate", "disable_recompute", "BT", "BC",
}  # fmt: skip
"""Its keywords that do not change a result."""
NAMES = {"use_qk_l2norm_in_kernel": "use_qk_l2norm"}


class StandIn(NamedTuple):
    """Ours in the place of functions of a package of ``fla.ops``.

    Attributes:
        functions: separated by blanks. ours: takes the arguments by our names.
        names: our names of its arguments, where they differ.
    """

    package: str
    functions: str
    ours: Callable[..., Any]
    names: dict[str, str] = {}


def _simple_gla(q: Any, k: Any, v: Any, g: Any = None, g_gamma: Any = None, **more: Any) -> Any:
    if g_gamma is not None:
        return ring_la.retention(q, k, v, g_gamma, **more)
    return ring_la.simple_gla(q, k, v, g, **more)


def _delta_product(q: Any, k: Any, v: Any, beta: Any, num_householder: int, g: Any = None, **more: Any) -> Any:
    k, v, beta = (x.unflatten(1, (-1, num_householder)) for x in (k, v, beta))
    g = q.new_zeros(beta[:, :, 0].shape, dtype=torch.float32) if g is None else g
    return ring_la.gated_delta_product(q, k, v, g=g, beta=beta, **more)


def _comba(q: Any, k: Any, v: Any, p: Any, g: Any, use_qk_l2norm: bool = False, **more: Any) -> Any:
    if use_qk_l2norm:  # of p, too
        p = (p * torch.rsqrt(p.float().square().sum(-1, keepdim=True) + 1e-6)).to(q.dtype)
    return ring_la.comba(q, k, v, p=p, g=g, use_qk_l2norm=use_qk_l2norm, **more)


def _slots(q: Any, k: Any, **more: Any) -> Any:
    if q.shape[2] != k.shape[2]:
        pytest.skip("ring_la's has no queries that share keys")
    return ring_la.gated_slot_attention(q, k, **more)


STAND_INS = (
    StandIn("hgrn", "chunk_hgrn fused_recurrent_hgrn", ring_la.hgrn),
    StandIn("gla", "chunk_gla fused_recurrent_gla", ring_la.gla, {"gk": "g"}),
    StandIn(
        "simple_gla",
        "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla",
        _simple_gla,
    ),
    StandIn("gsa", "chunk_gsa fused_recurrent_gsa", _slots),
    StandIn("comba", "chunk_comba fused_recurrent_comba", _comba),
    StandIn("gdn2", "chunk_gdn2 fused_recurrent_gdn2", ring_la.gdn2),
    StandIn("gated_delta_product", "chunk_gated_delta_product", _delta_product),
    StandIn(
        "gated_oja_rule", "chunk_gated_oja_rule fused_recurrent_gated_oja_rule", ring_la.gated_oja_rule, {"gv": "g"}
    ),
    StandIn("forgetting_attn", "parallel_forgetting_attn", ring_la.forgetting_attention),
    StandIn(
        "generalized_delta_rule.dplr",
        "chunk_dplr_delta_rule fused_recurrent_dplr_delta_rule",
        ring_la.dplr_delta_rule,
        {"gk": "g"},
    ),
    StandIn("delta_rule", "chunk_delta_rule", ring_la.delta_rule),
    StandIn("rwkv6", "chunk_rwkv6", ring_la.rwkv6),
)
SAME = {"gated_delta_rule": "chunk_gated_delta_rule", "kda": "chunk_kda"}
"""Those of `ring_la.integrations.fla`, which have its signatures."""


def stand_in(theirs: Callable[..., Any], made: StandIn) -> Callable[..., Any]:
    """Ours, called as theirs."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def call(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        values_first = given.pop("state_v_first", False)
        taken = {n: x for n, x in given.items() if x is not None and x is not False and n not in HARMLESS}
        taken = {made.names.get(n, NAMES.get(n, n)): x for n, x in taken.items()}
        unknown = set(taken) - set(inspect.signature(made.ours).parameters)
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(made.ours).parameters.values()):
            pytest.skip(f"ring_la's has no {', '.join(sorted(unknown))}")
        if values_first and "initial_state" in taken:
            taken["initial_state"] = taken["initial_state"].mT
        out = made.ours(**taken)
        if "output_final_state" not in signature.parameters:
            return out.o if "output_attentions" not in signature.parameters else (out.o, None)
        final = out.final_state
        return out.o, final.mT if values_first and final is not None else final

    return call


def _put(package: str, name: str, ours: Callable[..., Any]) -> None:
    """Put a function in the place of another wherever the package has it."""
    top = f"fla.ops.{package}"
    theirs = getattr(importlib.import_module(top), name)
    for place in [m for n, m in sys.modules.items() if (n == top or n.startswith(f"{top}.")) and m is not None]:
        if getattr(place, name, None) is theirs:
            setattr(place, name, ours)


def pytest_configure(config: pytest.Config) -> None:
    utils = importlib.import_module("fla.utils")
    if not torch.cuda.is_available():
        utils.device = "cpu"
    for made in STAND_INS:
        package = importlib.import_module(f"fla.ops.{made.package}")
        for name in made.functions.split():
            _put(made.package, name, stand_in(getattr(package, name), made))
    for package, name in SAME.items():
        importlib.import_module(f"fla.ops.{package}")
        _put(package, name, getattr(adapters, name))
