"""Strided tensors as direct launches take them (see `launch`): on a 16-byte boundary, strides that keep loads wide.

A size that is not specialised tells the compiler nothing about its divisors, and rows of unknown alignment are loaded
element by element. So strides that 16 divides are passed as multiples of 16, and the kernel multiplies by the constant.
"""

from __future__ import annotations

from torch import Tensor

from ring_la.kernels.runtime.triton_version import ALIGNMENT


def on_boundary(x: Tensor) -> Tensor:
    """`x` without its history, on a 16-byte boundary, its strides as they are; itself where it is so."""
    x = x.detach() if x.requires_grad else x
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def rows(x: Tensor) -> Tensor:
    """The same with the last dimension contiguous."""
    return on_boundary(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def matrix(x: Tensor, width: int) -> tuple[Tensor, int, int]:
    """`x` as rows of its last `width` elements: what begins where they do, unit, and the step from row to row in it."""
    if x.is_contiguous():  # as it is: a view takes the host as long as a launch
        x, step = on_boundary(x), 0 if x.numel() == width else width
    else:
        x = rows(x.reshape(-1, width))
        step = 0 if x.shape[0] == 1 else x.stride(0)
    unit = 1 if step % 16 else 16
    return x, unit, step // unit


def strides(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """(unit, strides of all dimensions but the last in it): a dimension of one element has none."""
    found = [0 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride())]
    unit = 1 if any(s % 16 for s in found) else 16
    return unit, tuple(s // unit for s in found)
