"""What a launch promises of its arguments, checked where somebody asks for it: tests do, a call's host time does not.

    "contiguous"   tensors are contiguous and on a 16-byte boundary; sizes are in the kernel's ``do_not_specialize``
    "strided"      the same, but tensors lie as their strides say, which are sizes too
    "any"          nothing: the kernel is compiled for each class of sizes and boundaries that comes

Of what keeps the promise a kernel is compiled once for its constants and dtypes, whatever the lengths, and a launch can
be replayed on other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from ring_la.kernels.runtime.triton_version import ALIGNMENT, unspecialised

Promise = Literal["contiguous", "strided", "any"]


checking = False
"""Whether launches of this process are checked."""


def check_arguments(wanted: bool = True) -> None:
    """Check every launch of this process from now on, or no longer."""
    global checking
    checking = wanted


def check(kernel: Any, args: Sequence[Any], promise: Promise) -> None:
    """Raise an AssertionError that names the kernel and the argument which breaks the promise."""
    if promise == "any":
        return
    for name, x, free in zip(kernel.arg_names, args, unspecialised(kernel)):
        broken = _broken(x, free, promise)
        if broken:
            raise AssertionError(f"{kernel.__name__}: argument {name}: expected {broken}")


def _broken(x: Any, free: bool, promise: Promise) -> str:
    """What was expected and what came, or an empty string."""
    if type(x) is int and not free:
        return f"a size in do_not_specialize, got {x}, which the kernel is specialised on"
    if not isinstance(x, Tensor):
        return ""
    if x.data_ptr() % ALIGNMENT:
        return f"a tensor on a boundary of {ALIGNMENT} bytes, got one {x.data_ptr() % ALIGNMENT} bytes behind it"
    if promise == "contiguous" and not x.is_contiguous():
        return f"a contiguous tensor, got {list(x.shape)} with strides {list(x.stride())}"
    return ""
