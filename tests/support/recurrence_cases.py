"""Inputs every conformance test draws, by the definitions of the recurrences."""

from __future__ import annotations

from typing import Any

from ring_la.recurrences import RECURRENCES as DEFINITIONS
from ring_la.testing.examples import DOCUMENTS as ALL_DOCUMENTS
from ring_la.testing.examples import error, gates, make_arguments

BY_NAME = {r.name: r for r in DEFINITIONS}
RECURRENCES = tuple(r.name for r in DEFINITIONS if not r.composed)
"""Those of one rule and one scan; what is made of them is checked in tests/conformance/test_composed.py."""
COMPOSED = tuple(r.name for r in DEFINITIONS if r.composed)
DOCUMENTS = {name: case for name, case in ALL_DOCUMENTS.items() if not name.startswith("small")}
STATIC = {r.name: r.shared for r in DEFINITIONS if r.shared}
"""Inputs without a token dimension: shared, their gradient is each rank's part."""

__all__ = ["BY_NAME", "COMPOSED", "DOCUMENTS", "RECURRENCES", "STATIC", "error", "gates", "make_inputs"]


def make_inputs(name: str, *sizes: Any, **keywords: Any) -> dict[str, Any]:
    """Arguments of the recurrence `name`, by name; floats are leaves that want gradients."""
    if name == "mamba2":  # of seed 0 a bf16 loop's dD is right to less than fp32's rounding, by chance: no budget
        keywords.setdefault("seed", 1)
    inputs = make_arguments(BY_NAME[name], *sizes, **keywords)
    if name == "retention":  # the paper's decays
        del inputs["g"]
    return inputs
