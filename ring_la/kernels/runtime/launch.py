"""The one way to launch a Triton kernel: by Triton the first time, then without asking it how.

Triton inspects every argument of every call, some 50 µs with the many arguments these kernels have. Here a launch looks
at no more than what tells classes of arguments apart (dtypes, constants, boundaries, the sizes a kernel is specialised
on); what was compiled for a class is launched directly from the second call on, with addresses for tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ring_la.kernels.runtime import contract
from ring_la.kernels.runtime.contract import Promise
from ring_la.kernels.runtime.observer import observing
from ring_la.kernels.runtime.streams import launching_on
from ring_la.kernels.runtime.triton_version import (
    ALIGNMENT,
    NARROW,
    CompiledKernel,
    InterpretedKernel,
    TensorDescriptor,
    bind_device,
    class_of,
    compiles,
    current_stream,
    unspecialised,
)


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous, on a 16-byte boundary and without its history; itself where it is so already."""
    x = (x.detach() if x.requires_grad else x).contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def filled(*tensors: Tensor | TensorDescriptor | None, by: Tensor | None = None) -> list[Tensor | TensorDescriptor]:
    """The tensors of a launch: in the place of an absent one `by`, or the first, which a constant tells the kernel to
    leave alone. (A None would be a constant of its own, and the kernel another one.)"""
    some = tensors[0] if by is None else by
    some = some.base if isinstance(some, TensorDescriptor) else some
    return [some if x is None else x for x in tensors]


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    tensors: Promise = "contiguous",
    stream: torch.cuda.Stream | None = None,
    carveout: bool = False,
    **constants: Any,
) -> None:
    """``kernel[grid](*args, **constants)`` on the tensors' device.

    Args:
        args: tensors, sizes and tensor descriptors, by position; at least one is a tensor or a descriptor.
        constants: what is ``tl.constexpr``, and Triton's options, by name; every parameter behind `args` is here.
        tensors: what the caller promises of them (see `contract`).
        stream: where it goes; None: the stream of `streams.aside`, or the current one.
        carveout: it shares multiprocessors with kernels that need much shared memory.
    """
    device = _device(args)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, tensors=tensors, stream=stream, carveout=carveout, **constants)
    if contract.checking:
        contract.check(kernel, args, tensors)
    grid, stream = (*grid, 1, 1)[:3], launching_on.get() if stream is None else stream
    how: Any
    known = _known.get(id(kernel)) or _known.setdefault(id(kernel), _Known(kernel))
    if known.compiles:
        how = known.launch(grid, args, constants, device, stream, carveout)  # type: ignore[arg-type]
    else:
        how = InterpretedKernel(kernel, constants)
        how(grid, args)
    observer = observing.get()
    if observer is not None:
        observer.launched(how, grid, args, stream)


class _Known:
    """A kernel, and what Triton has compiled of it for the classes of arguments that came. Holds the kernel, so that
    its id stays its own: to hash a kernel, Triton reads its source."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiles = kernel, compiles(kernel)
        self._unspecialised = unspecialised(kernel)
        self._compiled: dict[Hashable, CompiledKernel] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        constants: dict[str, Any],
        device: torch.device,
        stream: torch.cuda.Stream | None,
        carveout: bool,
    ) -> CompiledKernel:
        """Launch what is compiled for such arguments, or have Triton compile and launch it."""
        key: list[Hashable] = [device, carveout, *constants, *constants.values()]
        flat: list[Any] = []
        for x, free in zip(args, self._unspecialised):
            if isinstance(x, Tensor):
                flat.append(address := x.data_ptr())
                key.append(x.dtype if address % ALIGNMENT == 0 else class_of(x, free))
                continue
            flat.append(x)
            if free and type(x) is int:
                key.append(-NARROW <= x < NARROW)
                continue
            if isinstance(x, TensorDescriptor):
                bind_device()
            key.append(class_of(x, free))
        found = self._compiled.get(tuple(key))
        if found is not None:
            found(grid, current_stream(device.index) if stream is None else stream.cuda_stream, flat)
            return found
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            made = self.kernel[grid](*args, **constants)
        found = CompiledKernel(made, [constants[name] for name in self.kernel.arg_names[len(args) :]])
        if carveout:
            found.prefer_shared_memory()
        return self._compiled.setdefault(tuple(key), found)


_known: dict[int, _Known] = {}
"""By the kernel's id."""


def _device(args: Sequence[Any]) -> torch.device:
    for x in args:
        if isinstance(x, Tensor):
            return x.device
        if isinstance(x, TensorDescriptor):
            return x.base.device
    raise AssertionError("a launch needs a tensor to know its device")
