"""The door from ``ring-la bench`` to `benchmarks/`, a package that a checkout has beside ring_la and that no
installation holds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from ..errors import UnsupportedError

CHECKOUT = Path(__file__).resolve().parents[2]
BENCHMARKS = "benchmarks"


def find(name: str) -> ModuleType:
    """The module `benchmarks.NAME.bench` of the checkout that this ring_la is part of.

    Raises:
        UnsupportedError: this ring_la was installed without its checkout.
    """
    if not (CHECKOUT / BENCHMARKS / name / "bench.py").exists():
        hint = f"Benchmarks run from a checkout: clone ring_la and run there `python -m ring_la bench {name}`"
        raise UnsupportedError("ring_la", "a checkout, with benchmarks/ beside it", f"the one in {CHECKOUT}", hint)
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module(f"{BENCHMARKS}.{name}.bench")
