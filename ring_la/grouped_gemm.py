"""Grouped GEMM: every run of rows is multiplied by its own matrix, as a mixture of experts does.

    C[r] = A[r] · B[g]   for the rows r of group g,   A [M, K], B [G, K, N], C [M, N]

The rows of A are sorted by group; `group_sizes` [G] says how many each has. Its gradients are

    dA[r] = dC[r] · B[g]ᵀ                     a grouped GEMM again,
    dB[g] = Σ over the rows r of g A[r]ᵀ dC[r]    an outer product a group,

and the gradients of the outer product are grouped GEMMs. So the two operators below are each other's derivative,
derivatives of every order are exact, and no wrapper around a kernel can lose the graph. Who computes a product is
chosen in ring_la.kernels.grouped, below the operators: autograd and torch.compile see only schemas and fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from ring_la.autograd import refuse_transforms
from ring_la.choices import GroupedBackend
from ring_la.errors import ArgumentError, UnsupportedError, describe_tensor
from ring_la.kernels.grouped import GroupedProduct, check_name, choose, load

__all__ = ["grouped_gemm"]


@overload
def grouped_gemm(a: Tensor, b: Tensor, group_sizes: Tensor, *, backend: GroupedBackend = "auto") -> Tensor: ...
@overload
def grouped_gemm(a: Sequence[Tensor], b: Sequence[Tensor], *, backend: GroupedBackend = "auto") -> list[Tensor]: ...
def grouped_gemm(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    group_sizes: Tensor | None = None,
    *,
    backend: GroupedBackend = "auto",
) -> Tensor | list[Tensor]:
    """Multiply consecutive groups of rows of `a` each by its own matrix of `b`.

    a : [M, K]. The rows of group 0, then those of group 1, … Rows past the sum of the sizes come back as zeros and
        have zero gradients, whatever they hold.
    b : [G, K, N], in the dtype of `a`. Any strides: stored by rows or by columns (``weights.mT``) it is used as it
        is; otherwise a copy is made, as it is of an `a` whose rows are not contiguous.
    group_sizes : [G], int32 or int64, each ≥ 0, on the device of `a` or on the CPU. On the CPU they must sum to M. On
        CUDA nobody looks at them from the host: rows past the sum are zero, and sizes that overrun M are cut there.
    backend : "auto", "loop", "torch", "triton" or "cutlass". A named backend computes this product, or raises
        `UnsupportedError` saying which can; it computes the gradients too where it can, and "auto" where not.

    Returns [M, N]. With two lists, `a` of [M_i, K_i] and `b` of [K_i, N_i], returns the list of their products; groups
    of one shape are packed into the call above, groups of several are multiplied one by one.

    Every floating-point dtype works; sums are fp32 (fp64 for fp64). Inside autocast both operands are cast.
    """
    check_name(backend)
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        return _grouped_list(a, b, group_sizes, backend)
    a, b = _operands(a, b)
    _check_sizes(a, b, group_sizes)
    refuse_transforms((("a", a), ("b", b)))
    a, b = _autocast(a), _autocast(b)
    if a.dtype != b.dtype:
        raise ArgumentError("b", f"the dtype of a, {a.dtype}", b.dtype, "Cast one of them: nothing is cast silently")
    return torch.ops.ring_la.grouped_rows(a, b, group_sizes, backend, True)


def _grouped_list(a: object, b: object, group_sizes: object, backend: GroupedBackend) -> list[Tensor]:
    if not (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple))):
        name, other = ("b", b) if isinstance(a, (list, tuple)) else ("a", a)
        raise ArgumentError(name, "a list of tensors, as the other operand", _shape(other))
    if group_sizes is not None:
        raise ArgumentError("group_sizes", "None with lists, whose lengths say it", type(group_sizes).__name__)
    if len(a) != len(b):
        raise ArgumentError("b", f"{len(a)} matrices, one for each of a", f"{len(b)}")
    for i, pair in enumerate(zip(a, b, strict=True)):
        _check_pair(i, *pair)
    same = all(y.shape == b[0].shape and y.dtype == b[0].dtype and y.device == b[0].device for y in b)
    if not a or not same or (backend == "auto" and not a[0].is_cuda) or backend == "loop":
        if backend not in ("auto", "loop"):
            raise UnsupportedError("backend", "'auto' or 'loop' for matrices of several shapes", repr(backend))
        return [x @ y for x, y in zip(a, b, strict=True)]
    sizes = torch.tensor([x.shape[0] for x in a], device="cpu")
    packed = grouped_gemm(torch.cat(list(a)), torch.stack(list(b)), sizes, backend=backend)
    return list(packed.split([x.shape[0] for x in a]))


def _check_pair(i: int, x: Any, y: Any) -> None:
    for name, z, form in ((f"a[{i}]", x, "[M, K]"), (f"b[{i}]", y, "[K, N]")):
        if not isinstance(z, Tensor) or z.dim() != 2 or z.layout is not torch.strided:
            raise ArgumentError(name, f"a dense tensor {form}", describe_tensor(z))
        if not z.dtype.is_floating_point:
            raise ArgumentError(name, "a floating-point dtype", z.dtype)
    if x.device != y.device:
        raise ArgumentError(f"b[{i}]", f"the device of a[{i}], {x.device}", y.device)
    if x.shape[1] != y.shape[0]:
        raise ArgumentError(f"b[{i}]", f"[K, N] with K = {x.shape[1]}, as a[{i}] has", _shape(y))
    if x.dtype != y.dtype:
        raise ArgumentError(f"b[{i}]", f"the dtype of a[{i}], {x.dtype}", y.dtype)


def _shape(x: object) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _operands(a: object, b: object) -> tuple[Tensor, Tensor]:
    for name, x, dims, form in (("a", a, 2, "[M, K]"), ("b", b, 3, "[G, K, N]")):
        if not isinstance(x, Tensor) or x.dim() != dims or x.layout is not torch.strided:
            raise ArgumentError(name, f"a dense tensor {form}", describe_tensor(x))
        if not x.dtype.is_floating_point:
            raise ArgumentError(name, "a floating-point dtype", x.dtype)
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    if a.shape[1] != b.shape[1]:
        raise ArgumentError(
            "b", f"[G, K, N] with K = {a.shape[1]}, as a has", _shape(b), "Transpose with b.mT if need be"
        )
    if a.device != b.device:
        raise ArgumentError("b", f"the device of a, {a.device}", b.device)
    return a, b


def _check_sizes(a: Tensor, b: Tensor, group_sizes: object) -> None:
    if not isinstance(group_sizes, Tensor) or group_sizes.dim() != 1 or group_sizes.shape[0] != b.shape[0]:
        raise ArgumentError("group_sizes", f"a tensor [G] with G = {b.shape[0]}, as b has", _shape(group_sizes))
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("group_sizes", "int32 or int64", group_sizes.dtype)
    if group_sizes.device.type != "cpu" and group_sizes.device != a.device:
        raise ArgumentError("group_sizes", f"the CPU or the device of a, {a.device}", group_sizes.device)


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


# The operators. `strict` is False for the gradients: there a named backend that cannot is replaced by "auto".


@torch.library.custom_op("ring_la::grouped_rows", mutates_args=())
def _rows(a: Tensor, b: Tensor, group_sizes: Tensor, backend: str, strict: bool) -> Tensor:
    return _compute(GroupedProduct("rows", a, b, group_sizes), backend, strict)


@torch.library.custom_op("ring_la::grouped_outer", mutates_args=())
def _outer(a: Tensor, d: Tensor, group_sizes: Tensor, backend: str, strict: bool) -> Tensor:
    return _compute(GroupedProduct("outer", a, d, group_sizes), backend, strict)


@_rows.register_fake
def _(a: Tensor, b: Tensor, group_sizes: Tensor, backend: str, strict: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]))


@_outer.register_fake
def _(a: Tensor, d: Tensor, group_sizes: Tensor, backend: str, strict: bool) -> Tensor:
    return a.new_empty((group_sizes.shape[0], a.shape[1], d.shape[1]))


def _compute(call: GroupedProduct, backend: str, strict: bool) -> Tensor:
    if call.sizes.device.type == "cpu":
        _check_values(call.sizes, call.x.shape[0])
    if 0 in (*call.x.shape, *call.y.shape, call.groups):
        return call.empty().zero_()
    if not strict and backend != "auto" and load(backend).unsupported(call):
        backend = "auto"
    backend = choose(backend, call)
    if backend != "loop":
        call = call._replace(sizes=call.sizes.to(call.x.device, non_blocking=True))
    with torch.cuda.device_of(call.x):
        return load(backend).compute(call)


def _check_values(sizes: Tensor, rows: int) -> None:
    if sizes.numel() and int(sizes.min()) < 0:
        raise ArgumentError("group_sizes", "sizes ≥ 0", sizes.tolist())
    if int(sizes.sum()) != rows:
        raise ArgumentError("group_sizes", f"sizes that sum to M = {rows}", f"{sizes.tolist()}, sum {int(sizes.sum())}")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, group_sizes, ctx.backend, _ = inputs
    ctx.save_for_backward(x, y, group_sizes)


def _rows_backward(ctx: Any, dc: Tensor) -> Any:
    a, b, sizes = ctx.saved_tensors
    rows, outer = torch.ops.ring_la.grouped_rows, torch.ops.ring_la.grouped_outer
    da = rows(dc, b.mT, sizes, ctx.backend, False) if ctx.needs_input_grad[0] else None
    db = None
    if ctx.needs_input_grad[1]:  # it lies as b does, or the sum of a parameter's gradients would be a copy
        by_columns = b.stride(-2) == 1 and b.stride(-1) != 1
        x, y = (dc, a) if by_columns else (a, dc)
        db = outer(x, y, sizes, ctx.backend, False)
        db = db.mT if by_columns else db
    return da, db, None, None, None


def _outer_backward(ctx: Any, dc: Tensor) -> Any:
    a, d, sizes = ctx.saved_tensors
    rows = torch.ops.ring_la.grouped_rows
    da = rows(d, dc.mT, sizes, ctx.backend, False) if ctx.needs_input_grad[0] else None
    dd = rows(a, dc, sizes, ctx.backend, False) if ctx.needs_input_grad[1] else None
    return da, dd, None, None, None


def _no_vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
    hint = "Fold the batch into the rows of a and into group_sizes, or loop over it"
    raise UnsupportedError(
        "a, b, group_sizes", "tensors that torch.vmap does not batch", f"in_dims {in_dims[:3]}", hint
    )


_rows.register_autograd(_rows_backward, setup_context=_save)
_outer.register_autograd(_outer_backward, setup_context=_save)
_rows.register_vmap(_no_vmap)
_outer.register_vmap(_no_vmap)
