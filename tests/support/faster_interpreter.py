"""Triton's interpreter without work it does again and again: what it computes stays the same, in a third of the time.

Its own way takes most of the time of our kernels' tests, not NumPy's products. `make_faster` replaces four functions of
Triton 3.6 by ones that remember: the patches of `triton.language`, made in every call of a device function (`tl.sum`
among them); a table of dtypes, made for every operation; the shapes of tensors and of their types; and a reduction by a
function of the kernel's, element by element, which goes by slices here. Others compare shapes and types and look for
constants without making objects for it, take operands of one type and shape as they are, and leave out what only an
assertion of debugging would read: each sum of integers once more in 64 bits.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def make_faster(interpreter: ModuleType) -> None:
    """Change `triton.runtime.interpreter` of this process, if it is the one written for; call once."""
    import triton

    if not triton.__version__.startswith("3.6."):
        return
    interpreter._patch_lang = PatchedOnce(interpreter._patch_lang)
    interpreter._get_np_dtype = remembered_dtypes(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = by_slices(interpreter.ReduceOps.generic_reduce)
    interpreter._patch_attr = patched_attribute(interpreter)
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    remember_shapes()
    compare_quickly()
    compare_types_quickly()
    take_as_they_are(interpreter)


class PatchedOnce:
    """`_patch_lang`, which makes the functions of `triton.language` interpreted ones: once a launch, until its end."""

    def __init__(self, patch: Callable) -> None:
        self.patch = patch
        self.during: set[ModuleType] = set()
        self.of: dict[Callable, set[ModuleType]] = {}

    def __call__(self, fn: Callable) -> Any:
        import triton.language as tl

        if fn not in self.of:
            self.of[fn] = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
        languages = self.of[fn]
        if self.during and languages <= self.during:
            return None  # to a device function, which does not ask for the patches' end
        scope, launch = self.patch(fn), not self.during
        self.during |= languages
        if launch:
            restore = scope.restore

            def ended() -> None:
                self.during.clear()
                restore()

            scope.restore = ended
        return scope


def patched_attribute(interpreter: ModuleType) -> Callable:
    """`_patch_attr`, whose functions copy their keywords in every call."""
    semantics: dict[int, Any] = {}

    def patch_attribute(obj: Any, name: str, member: Callable, builder: Any, scope: Any) -> None:
        semantic = semantics.get(id(builder)) or semantics.setdefault(id(builder), interpreter.TritonSemantic(builder))

        def called(*args: Any, **keywords: Any) -> Any:
            keywords["_semantic"] = semantic
            return member(*args, **keywords)

        scope.set_attr(obj, name, called)

    return patch_attribute


def remembered_dtypes(original: Callable) -> Callable:
    """`_get_np_dtype`, which makes its table anew in every call."""
    import triton.language as tl

    known: dict[str, np.dtype] = {}

    def np_dtype(dtype: Any) -> np.dtype:
        dtype = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    return np_dtype


def remember_shapes() -> None:
    """Tensors and types of one shape share the objects that say so, as nobody writes into them."""
    import triton.language.core as core

    of_types: dict[tuple[int, ...], tuple] = {}
    of_tensors: dict[tuple[int, ...], tuple] = {}
    names: dict[tuple, str] = {}

    def type_init(self, element_ty: Any, shape: Any) -> None:
        shape = shape.values if builtins.type(shape) is core.tuple else shape
        sizes = builtins.tuple([n.value if builtins.type(n) is core.constexpr else n for n in shape])
        if sizes not in of_types:
            core_type(self, element_ty, list(sizes))
            of_types[sizes] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel), self.sizes = element_ty, of_types[sizes], sizes
        key = sizes, element_ty.name
        self.name = names.get(key) or names.setdefault(key, f"<{self.shape}, {element_ty}>")

    def tensor_init(self, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in of_tensors:
            of_tensors[sizes] = core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        (self.shape, self.numel), self.sizes = of_tensors[sizes], sizes

    core_type, core.block_type.__init__ = core.block_type.__init__, type_init
    core.tensor.__init__ = tensor_init


def compare_quickly() -> None:
    """A shape beside a list is compared by its elements, and what is no constant is told by its type."""
    import triton.language.core as core

    equal, unwrap = core.tuple.__eq__, core._unwrap_if_constexpr
    plain = {core.tensor, int, float, bool, str, type(None)}

    def eq(self, other: Any) -> Any:
        return core.constexpr(self.values == other) if type(other) is list else equal(self, other)

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) in plain else x.value if type(x) is core.constexpr else unwrap(x)

    core.tuple.__eq__ = eq
    core._unwrap_if_constexpr = unwrap_if_constexpr


def compare_types_quickly() -> None:
    """Types of one name are equal; whether one is of integers is looked up."""
    import triton.language.core as core

    dtype, equal = core.dtype, core.dtype.__eq__
    integers = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)
    dtype.__eq__ = lambda self, other: (
        self is other or (self.name == other.name if isinstance(other, dtype) else equal(self, other))
    )
    dtype.is_int = lambda self: self.name in integers


def take_as_they_are(interpreter: ModuleType) -> None:
    """Operands of one type need no cast, and of one shape no broadcast."""
    semantic = interpreter.TritonSemantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def checked(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        given = fitting(self, lhs, rhs, lhs_ptr) if arithmetic_check and not div_or_mod else None
        if given is None:
            return check(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic_check, div_or_mod)
        return broadcasted(self, *given)

    def broadcasted(self, lhs, rhs):
        a, b = lhs.sizes, rhs.sizes
        if a == b:
            return lhs, rhs
        if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b)):
            return broadcast(self, lhs, rhs)  # a scalar, more dimensions, or an error
        common = builtins.tuple([y if x == 1 else x for x, y in zip(a, b)])
        return stretched(self, lhs, common), stretched(self, rhs, common)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcasted


def stretched(semantic: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    """`x` in a shape that it has but for sizes of 1."""
    import triton.language.core as core

    if x.sizes == sizes:
        return x
    kind = core.block_type(x.type.scalar, list(sizes))
    return semantic.tensor(semantic.builder.create_broadcast(x.handle, list(sizes)), kind)


def fitting(semantic: Any, lhs: Any, rhs: Any, lhs_ptr: bool) -> tuple[Any, Any] | None:
    """The operands of a sum, a product or a comparison, as tensors of types that go together; None: not told here."""
    import triton.language.core as core

    if type(lhs) is not core.tensor:
        found = fitting(semantic, rhs, lhs, False) if type(rhs) is core.tensor else None
        return found and found[::-1]
    one = lhs.dtype
    if type(rhs) is core.tensor:
        plain = one is rhs.dtype and type(one) is core.dtype
        offset = lhs_ptr and type(one) is core.pointer_type and (rhs.dtype is core.int32 or rhs.dtype is core.int64)
        return (lhs, rhs) if plain or offset else None
    if one is core.float32:
        fits = type(rhs) in (int, float)
    else:
        fits = (one is core.int32 or one is core.int64) and type(rhs) is int and 0 <= rhs < 2**31
    return (lhs, semantic.scalar_constant(rhs, one)) if fits else None


def by_slices(original: Callable) -> Callable:
    """`ReduceOps.generic_reduce` of several dimensions: the same combinations in the same order, a slice at a time."""

    def reduce(self, input: tuple) -> list:
        if self.axis is None or self.keep_dims or input[0].handle.data.ndim < 2:
            return original(self, input)
        slices = [
            builtins.tuple(self.to_tensor(np.take(x.handle.data, i, self.axis), x.dtype) for x in input)
            for i in range(input[0].handle.data.shape[self.axis])
        ]
        total = slices[0]
        for each in slices[1:]:
            found = self.combine_fn.fn(*total, *each)
            total = found if isinstance(found, builtins.tuple) else (found,)
        return [self.to_tensor(x.handle.data, like.dtype) for x, like in zip(total, input, strict=True)]

    return reduce
