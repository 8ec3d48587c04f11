"""Who computes a grouped product: a registry of backends, one file each.

A backend is a module here that defines ``backend``, an object with the methods of `GroupedBackend`. Its name in
`BACKENDS` (and, for "auto" to try it, in preference.py) is all there is to register; tests walk the registry.
Modules are imported when they are first asked for, so Triton and CUTLASS need not be there.
"""

from __future__ import annotations

import functools
import importlib

from ring_la.errors import ArgumentError, UnsupportedError

from .preference import preferred
from .product import GroupedBackend, GroupedProduct, Product

__all__ = ["BACKENDS", "GroupedBackend", "GroupedProduct", "Product", "check_name", "choose", "load"]

#: Name of a backend → the module of this package that holds it.
BACKENDS = {"loop": "loop", "torch": "aten", "triton": "triton_backend", "cutlass": "cutlass_backend"}


@functools.cache
def load(name: str) -> GroupedBackend:
    """The backend of that name."""
    return importlib.import_module(f"{__name__}.{BACKENDS[name]}").backend


def check_name(name: object) -> None:
    if name != "auto" and (not isinstance(name, str) or name not in BACKENDS):
        raise ArgumentError("backend", f"'auto' or one of {list(BACKENDS)}", repr(name))


def choose(name: str, call: GroupedProduct) -> str:
    """The backend for this call: the named one or, with "auto", the fastest that can do it."""
    if name != "auto":
        reason = load(name).unsupported(call)
        if not reason:
            return name
        able = [other for other in BACKENDS if not load(other).unsupported(call)]
        expected = f"one that can do this {call.product} product of {call.x.dtype} on {call.x.device}"
        raise UnsupportedError("backend", expected, f"{name!r} ({reason})", f"These can: {able}")
    for candidate in preferred(call):
        if not load(candidate).unsupported(call):
            return candidate
    reasons = "; ".join(f"{other}: {load(other).unsupported(call)}" for other in BACKENDS)
    raise UnsupportedError("a", "operands some backend can multiply", f"{call.x.dtype} on {call.x.device}", reasons)
