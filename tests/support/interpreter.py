"""Triton's interpreter on a CPU, and bf16 in it as GPUs compute it.

NumPy has no bf16, so the interpreter keeps the bits in uint16, and multiplies, adds and casts those. Here operands are
widened to fp32 and results rounded to nearest, ties to even.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.support.faster_interpreter import make_faster


def widened(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def compute_bf16() -> None:
    """Patch the interpreter of this process; a second call does nothing."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if hasattr(InterpreterBuilder, "bf16"):
        return
    InterpreterBuilder.bf16 = True
    binary, cast, dot = InterpreterBuilder.binary_op, InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def wide(x: TensorHandle) -> TensorHandle:
        return TensorHandle(widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        return TensorHandle(rounded(op(widened(lhs.data), widened(rhs.data))), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 != src.dtype.scalar:
            return TensorHandle(rounded(src.data), tl.bfloat16)
        return cast(self, wide(src), dst_type)

    def create_dot(self, a, b, *others):
        return dot(self, wide(a), wide(b), *others)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    for name in ("create_fp_trunc", "create_fp_ext", "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si",
                 "create_fp_to_ui"):  # fmt: skip
        setattr(InterpreterBuilder, name, cast_impl)


def multiply_alike() -> None:
    """A row of a product of matrices does not depend on where it stands in its tile, as on tensor cores: it is summed
    in fp64 and rounded once, where NumPy's order of a sum of fp32 follows the place. Call after `compute_bf16`."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *others):
        if d.dtype.scalar != tl.float32:
            return dot(self, a, b, d, *others)
        a, b = (widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        product = a.astype(np.float64) @ b.astype(np.float64)
        return TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def interpreted() -> None:
    """Have Triton interpret kernels on the CPU where there is no GPU; `tests.conftest` has asked for it.

    Skips the module where Triton is absent. The interpreter takes a loop's bound from an
    array of one element, which NumPy refuses from 2.4 on. From here on launches check their arguments.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    language = pytest.importorskip("triton.language")
    if type(language.sum).__name__ != "InterpretedFunction":  # a skip would hide all tests of kernels
        raise RuntimeError("Triton was imported to compile, without a GPU, before the tests asked for its interpreter")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if patch.__name__ != "patched":
        interpreter._patch_lang_tensor = patched
        make_faster(interpreter)
    from ring_la.kernels.runtime.contract import check_arguments

    check_arguments()
