"""The recurrences whose speed is measured, each with the shape of its transition: what rates, the planner and the
doctor call them by."""

from __future__ import annotations

from ..algebra import Transition

TRANSITIONS: dict[str, Transition] = {
    "linear_attention": "identity",
    "retention": "scalar",
    "simple_gla": "scalar",
    "gla": "diagonal",
    "delta_rule": "dense",
    "gated_delta_rule": "dense",
    "kda": "dense",
}
"""Name of a public function: the shape of A in `Affine`."""
