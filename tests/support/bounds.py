"""Triton's interpreter with pointers that know their tensor: what a kernel reads or writes outside it is an error.

An interpreted kernel's pointers are addresses of the process, so that one that leaves its tensor meets another's
numbers, or memory that happens to be there, where a GPU may stop. Here each tensor of a launch stands at an address of
its own, far from all others, and what meets memory is looked at first.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

APART = 44
"""Addresses of one launch's tensors lie 2^44 bytes apart, each in the middle of its own."""


class OutsideError(AssertionError):
    """A kernel met memory outside the tensor that its pointer is of."""


class Places:
    """The tensors of the launch on its way: where each is, and how many bytes it has."""

    def __init__(self) -> None:
        self.kernel = ""
        self.starts: list[int] = []
        self.sizes: list[int] = []

    def begin(self, kernel: str) -> None:
        self.kernel, self.starts, self.sizes = kernel, [], []

    def put(self, x: Any) -> int:
        """The address that stands for a tensor's."""
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
        self.starts.append(x.data_ptr())
        self.sizes.append(extent * x.element_size())
        return (len(self.starts) << APART) + (1 << APART - 1) + x.data_ptr() % 16

    def real(self, pointers: np.ndarray, mask: Any, what: str) -> np.ndarray:
        """The addresses that stand behind `pointers`, of which those under the mask are looked at."""
        mask = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape)
        number = (pointers >> np.uint64(APART)).astype(np.int64) - 1
        known = (number >= 0) & (number < len(self.starts))
        number = np.where(known, number, 0)
        starts = np.array(self.starts or [0], np.int64)[number]
        base = ((number + 1) << APART) + (1 << APART - 1) + starts % 16
        at = pointers.astype(np.int64) - base
        wrong = mask & ~(known & (at >= 0) & (at < np.array(self.sizes or [0], np.int64)[number]))
        if wrong.any():
            one = tuple(i[0] for i in wrong.nonzero()) if wrong.ndim else ()
            tensor, size = int(number[one]), self.sizes[int(number[one])]
            raise OutsideError(
                f"{self.kernel}: {what} of {int(wrong.sum())} numbers outside; byte {int(at[one])} of {size} of tensor "
                f"number {tensor}"
            )
        return np.where(mask, starts + at, 0).astype(np.uint64)


@functools.cache
def look_at_bounds() -> Places:
    """Patch the interpreter of this process, once; see tests/support/interpreter.py for what else is patched."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton.runtime.jit import mangle_type

    places = Places()
    convert, call = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    change = InterpreterBuilder.create_atomic_rmw

    def converted(x: Any) -> Any:
        if not hasattr(x, "data_ptr"):
            return convert(x)
        kind = tl.str_to_ty(mangle_type(x), None)
        return tl.tensor(TensorHandle(np.array([places.put(x)], dtype=np.uint64), kind), kind)

    def called(self: Any, *args: Any, **keywords: Any) -> Any:
        places.begin(self.fn.__name__)
        return call(self, *args, **keywords)

    def moved(pointers: Any, mask: Any, what: str) -> Any:
        return TensorHandle(places.real(pointers.data, mask.data, what), pointers.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *others: Any, **more: Any) -> Any:
        return load(self, moved(pointers, mask, "a load"), mask, *others, **more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return store(self, moved(pointers, mask, "a store"), value, mask, *others)

    def atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return change(self, op, moved(pointers, mask, "an atomic"), value, mask, *others)

    interpreter._implicit_cvt, interpreter.GridExecutor.__call__ = converted, called
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = masked_load, masked_store
    InterpreterBuilder.create_atomic_rmw = atomic
    return places
