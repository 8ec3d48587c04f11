"""Kernels in Gluon on a CPU: their Python code by PyTorch's operations, program after program.

Layouts say nothing here, copies and products are done when they are asked for. So this shows what is computed; whether
it is waited for, and where it lies, only a GPU shows.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


class Value(torch.Tensor):
    """A tile, or a number. ``x += y`` makes a new one."""

    type = SimpleNamespace(layout=None)
    __iadd__ = torch.Tensor.__add__
    __imul__ = torch.Tensor.__mul__


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """Into a contiguous tensor, at an offset or at many."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset, self.dtype = tensor, offset, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.tensor, self.offset - less)


class Shared:
    """Shared memory, filled with NaN."""

    def __init__(self, kind: torch.dtype, shape: list[int], layout: Any = None) -> None:
        self.data = torch.full(shape, torch.nan, dtype=kind)

    @classmethod
    def of(cls, data: Tensor) -> Shared:
        made = cls.__new__(cls)
        made.data = data
        return made

    shape = property(lambda self: self.data.shape)

    def index(self, i: int) -> Shared:
        return Shared.of(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared.of(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared.of(self.data.permute(order))

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)

    def load(self, layout: Any) -> Value:
        return value(self.data.clone())


def load(at: Pointer, mask: Tensor | None = None, other: float = 0.0, cache_modifier: str = "") -> Value:
    where = torch.as_tensor(at.offset)
    mask = torch.ones_like(where, dtype=torch.bool) if mask is None else mask.expand(where.shape)
    found = at.tensor.reshape(-1)[torch.where(mask, where, 0).long()]
    return value(torch.where(mask, found, torch.full_like(found, other)))


def store(at: Pointer, x: Tensor, mask: Tensor | None = None) -> None:
    mask = torch.ones_like(at.offset, dtype=torch.bool) if mask is None else mask.expand(at.offset.shape)
    at.tensor.view(-1)[at.offset[mask].long()] = x.expand(at.offset.shape)[mask].to(at.tensor.dtype).as_subclass(Tensor)


def atomic_add(at: Pointer, x: int, sem: str, scope: str) -> Value:
    """What was there."""
    before = value(at.tensor.view(-1)[int(at.offset)].clone())
    at.tensor.view(-1)[int(at.offset)] += x
    return before


def multiply(a: Any, b: Shared, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Value:
    left = a.data if isinstance(a, Shared) else a
    made = left.float() @ b.data.float()
    return value(total + made if use_acc else made)


def wait(outstanding: int, deps: list) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def scan(x: Any, axis: int, combine: Any, reverse: bool = False) -> Any:
    """Of one or of several, which are all sums."""
    if isinstance(x, tuple):
        return tuple(scan(part, axis, combine, reverse) for part in x)
    return value(x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis))


def copy(to: Shared, at: Pointer, mask: Tensor | None = None) -> None:
    to.data.copy_(load(at, mask))


def language(ids: tuple[int, ...]) -> SimpleNamespace:
    """Gluon's functions for one program."""
    named = ("NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMASharedLayout")
    named += ("SwizzledSharedLayout",)
    return SimpleNamespace(
        **dict.fromkeys(named, lambda *given: None), constexpr=None, int64=torch.int64, float32=torch.float32,
        bfloat16=torch.bfloat16, program_id=lambda i: value(ids[i]), allocate_shared_memory=Shared,
        static_range=range, arange=lambda a, b, layout=None: value(torch.arange(a, b)), load=load, store=store,
        zeros=lambda shape, kind, layout=None: value(torch.zeros(shape, dtype=kind)), exp2=torch.exp2,
        minimum=lambda a, b: min(int(a), int(b)), where=lambda c, a, b: torch.where(c, a, b),
        sum=lambda x, axis: x.sum(axis), convert_layout=lambda x, layout: x, associative_scan=scan,
        thread_barrier=lambda: None, atomic_add=atomic_add,
    )  # fmt: skip


def launch(kernel: JITFunction, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """`runtime.launch.launch` of a kernel in Gluon."""
    given = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
    modules = {sys.modules[kernel.fn.__module__], sys.modules["ring_la.kernels.triton.gluon_tiles"]}
    copies = SimpleNamespace(async_copy_global_to_shared=copy, commit_group=lambda: None, wait_group=lambda n: None)
    fixed = dict(async_copy=copies, warpgroup_mma=multiply, warpgroup_mma_wait=wait)
    fixed |= dict(fence_async_shared=lambda: None, widened=lambda x: x.float())
    before = {module: dict(vars(module)) for module in modules}
    try:
        for module in modules:
            plain = {n: f.fn for n, f in before[module].items() if isinstance(f, JITFunction)}
            vars(module).update(plain | {n: f for n, f in fixed.items() if n in before[module]})
        for ids in itertools.product(*map(range, grid)):
            for module in modules:
                module.gl = language((*ids, 0, 0))  # type: ignore[attr-defined]
            kernel.fn(*given, **constants)
    finally:
        for module in modules:
            vars(module).update(before[module])
