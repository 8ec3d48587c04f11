"""Launching a kernel again without asking Triton how.

Triton inspects every argument of every call, some 50 µs with the many arguments these kernels have. Here nothing can
differ between two calls of one class (the same constants and dtypes): tensors are aligned to 16 bytes and sizes are not
specialised. So what was compiled for a class is launched directly from the second call on.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
_compiled: dict[tuple, tuple] = {}


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous, on a 16-byte boundary and without its history; itself where it is so already."""
    x = x.detach().contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """``kernel[grid](*args, **constants)`` on the tensors' device: tensors and sizes by position, constants by name.

    Sizes must be in the kernel's ``do_not_specialize``, tensors `aligned`. Profilers' launch hooks are called as ever.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **constants)
    grid = (*grid, 1, 1)[:3]
    key = (kernel.__name__, device, *constants, *constants.values(), *[getattr(x, "dtype", None) for x in args])
    found = _compiled.get(key)
    if found is not None:
        compiled, rest = found
        compiled[grid](*args, *rest)
        return
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # nothing is compiled under the interpreter
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]
