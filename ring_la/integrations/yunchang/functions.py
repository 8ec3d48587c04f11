"""yunchang's autograd Functions and the entry points over them; see the package for their contract."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError, describe_tensor
from ...layout import check_cu_seqlens
from ...softmax.merging import wide
from ...softmax.plan import Saved
from ...softmax.tensors import Tensors
from .call import Masks, UpstreamCall, checked, group_of, settled


def _forward(
    ctx, call: UpstreamCall, q: Tensor, k: Tensor, v: Tensor, group, attn_type, attn_processor
) -> tuple[Tensor, Tensor]:
    k, v = k.contiguous(), v.contiguous()
    x = Tensors(q, k, v)
    out, lse, _ = call.plan(x, group_of(group)).forward(x)
    ctx.save_for_backward(q, k, v, out, lse)
    remember(ctx, call, group, attn_type, attn_processor)
    return out, lse


def remember(ctx, call: UpstreamCall, group, attn_type, attn_processor) -> None:
    """Everything upstream's backwards read, and our own record."""
    for name, value in call.masks._asdict().items():
        setattr(ctx, name, value)
    ctx.group = group
    ctx.attn_type, ctx.attn_processor = _upstream_type(attn_type), attn_processor
    ctx.ring_la = call
    ctx.set_materialize_grads(False)


def recall(ctx, kind: str, tensors: int = 3) -> UpstreamCall:
    """The call of a forward, ours or a subclass's that sets upstream's attributes or some of them.

    Args:
        tensors: how many of the inputs are tensors, without alibi_slopes.
    """
    own = getattr(ctx, "ring_la", None)
    if own is not None:
        return own
    masks = Masks(*(getattr(ctx, name, default) for name, default in Masks._field_defaults.items()))
    unknown = len(ctx.next_functions) - tensors - (masks.alibi_slopes is not None)
    if unknown > 0:  # joint keys: the gradient of q would lack their part
        expected = f"{tensors} tensors among the inputs of a forward that leaves the backward to its base class"
        raise UnsupportedError(_name(ctx), expected, tensors + unknown, "Override backward as well")
    if masks.softmax_scale is None:
        masks = masks._replace(softmax_scale=ctx.saved_tensors[0].shape[-1] ** -0.5)
    return UpstreamCall(kind, masks)


def others(ctx) -> list[None]:
    """The gradients of all inputs after q, k and v: none, and none may be wanted."""
    wanted = [n for n, needed in enumerate(ctx.needs_input_grad) if needed and n > 2]
    if wanted:
        expected = "no gradient of inputs after q, k and v"
        hint = "Such a tensor (alibi_slopes, a subclass's joint tensors) needs a backward of its own, or to be detached"
        raise UnsupportedError(_name(ctx), expected, f"of input {wanted[0]}", hint)
    return [None] * (len(ctx.needs_input_grad) - 3)


def _name(ctx) -> str:
    """The Function whose backward runs."""
    return type(ctx).__name__.removesuffix("Backward")


def _upstream_type(attn_type: object) -> object:
    """What upstream's backward can read: its own AttnType where yunchang is loaded."""
    kernels = sys.modules.get("yunchang.kernels")
    if kernels is None or isinstance(attn_type, kernels.AttnType):
        return attn_type
    return kernels.AttnType.FA if attn_type is None else kernels.AttnType.from_string(attn_type)


def _backward(ctx, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for as many inputs as the forward had, q, k and v first."""
    q, k, v, out, lse = ctx.saved_tensors[:5]
    call, x = recall(ctx, kind), Tensors(q, k, v)
    saved = Saved(x, out, lse.to(wide(q.dtype)))
    grads = call.plan(x, group_of(ctx.group)).backward(saved, dout, dlse)
    return grads.q, grads.k, grads.v, *others(ctx)


# -- varlen ------------------------------------------------------------------------------------------------


def pad_lse(lse: Tensor, cu: list[int], longest: int) -> Tensor:
    """``[H, T] → [N, H, longest]``, a row a document."""
    out = lse.new_zeros(len(cu) - 1, lse.shape[0], longest)
    for row, a, b in zip(out, cu, cu[1:]):
        row[:, : b - a] = lse[:, a:b]
    return out


def flat_lse(lse: Tensor, cu: list[int]) -> Tensor:
    """``[H, T]`` from either form."""
    if lse.dim() == 2:
        return lse
    return torch.cat([row[:, : b - a] for row, a, b in zip(lse, cu, cu[1:])], 1)


def check_packed(cu_seqlens: object, max_seqlen: object, q: Tensor, k: Tensor) -> None:
    """Refuse offsets that are not those of this rank's tokens."""
    if not isinstance(cu_seqlens, Tensor):
        raise ArgumentError("cu_seqlens", "an integer tensor [N+1]", describe_tensor(cu_seqlens))
    if len(k) != len(q):
        raise ArgumentError("k", f"as many tokens as q, {len(q)}", len(k))
    cu = check_cu_seqlens(cu_seqlens, len(q))
    longest = max(b - a for a, b in zip(cu, cu[1:]))
    if not hasattr(max_seqlen, "__index__") or int(max_seqlen) < longest:
        raise ArgumentError("max_seqlen", f"at least the longest document's {longest} tokens on this rank", max_seqlen)


def unpack(name: str, x: object, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked along `dim`."""
    if not isinstance(x, Tensor) or x.dim() != dim + 3 or x.shape[dim] != count:
        shape = f"[{'B, T' if dim == 2 else 'T'}, {count}, H, D]"
        raise ArgumentError(name, f"a tensor {shape}", describe_tensor(x))
    return x.unbind(dim)


def half_index(cu: list[int], front: bool, device: torch.device) -> slice | Tensor:
    """The first or second half of each document's local rows, as upstream keeps them for its backward."""
    if len(cu) == 2:
        return slice(None, cu[1] // 2) if front else slice(cu[1] // 2, None)
    index = torch.zeros(cu[-1], dtype=torch.bool, device=device)
    for a, b in zip(cu, cu[1:]):
        middle = (a + b) // 2
        index[a : middle if front else b] = front
        if not front:
            index[middle:b] = True
    return index


def varlen_forward(
    ctx, call: UpstreamCall, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, group
) -> tuple[Tensor, Tensor]:
    cu = cu_seqlens.tolist()
    x = Tensors(*(t.contiguous()[None] for t in (q, k, v)))
    out, lse, _ = call.plan(x, group_of(group), cu=cu).forward(x)
    out, lse = out[0], pad_lse(lse[0], cu, int(max_seqlen))
    halves = [half_index(cu, front, q.device) for front in (True, False)] if call.kind == "zigzag" else []
    ctx.is_half_index_tensor = bool(halves) and isinstance(halves[0], Tensor)
    if halves and not ctx.is_half_index_tensor:
        ctx.half_index0, ctx.half_index1 = halves
        halves = []
    ctx.save_for_backward(q, x.k[0], x.v[0], out, lse, cu_seqlens, *halves)
    ctx.max_seqlen = max_seqlen
    remember(ctx, call, group, None, None)
    return out, lse


def _varlen_backward(ctx, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors[:6]
    cu, call, x = cu_seqlens.tolist(), recall(ctx, kind, 4), Tensors(q[None], k[None], v[None])
    lse, dlse = (None if t is None else flat_lse(t, cu)[None] for t in (lse, dlse))
    saved = Saved(x, out[None], lse.to(wide(q.dtype)))
    dout = None if dout is None else dout[None]
    grads = call.plan(x, group_of(ctx.group), cu=cu).backward(saved, dout, dlse)
    return grads.q[0], grads.k[0], grads.v[0], *others(ctx)


# -- the Functions -----------------------------------------------------------------------------------------


def _dense_function(name: str, kind: str, doc: str) -> type[torch.autograd.Function]:
    """A Function over q, k and v ``[B, T, H, D]``."""

    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
        attn_type=None,
        attn_processor=None,
    ):
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        call = settled([group_of(group)], (q, k, v), lambda: checked(kind, Tensors(q, k, v), masks, attn_type))
        out, lse = _forward(ctx, call, q, k, v, group, attn_type, attn_processor)
        return (out, lse, None) if return_softmax else out

    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _backward(ctx, kind, dout, args[0] if args else None)

    return _function(name, kind, doc, forward, backward)


def _varlen_function(name: str, kind: str, doc: str) -> type[torch.autograd.Function]:
    """A Function over packed documents ``[T, H, D]``."""

    def forward(
        ctx,
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
    ):
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)

        def make() -> UpstreamCall:
            call = checked(kind, Tensors(q[None], k[None], v[None]), masks, None)
            check_packed(cu_seqlens, max_seqlen, q, k)
            return call

        offsets = tuple(cu_seqlens.tolist()) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        call = settled([group_of(group)], (q, k, v), make, offsets, packed=True)
        out, lse = varlen_forward(ctx, call, q, k, v, cu_seqlens, max_seqlen, group)
        return (out, lse, None) if return_softmax else out

    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _varlen_backward(ctx, kind, dout, args[0] if args else None)

    return _function(name, kind, doc, forward, backward)


def _function(name: str, kind: str, doc: str, forward: Callable, backward: Callable) -> type[torch.autograd.Function]:
    members = dict(forward=staticmethod(forward), backward=staticmethod(backward), kind=kind)
    return type(name, (torch.autograd.Function,), members | {"__doc__": doc, "__module__": __name__})


RingFlashAttnFunc = _dense_function(
    "RingFlashAttnFunc", "contiguous", "Ring attention over a contiguous split. Subclasses may override forward alone."
)
ZigZagRingFlashAttnFunc = _dense_function("ZigZagRingFlashAttnFunc", "zigzag", "Ring attention over a zigzag split.")
StripeFlashAttnFunc = _dense_function("StripeFlashAttnFunc", "stripe", "Ring attention over a striped split.")
RingFlashAttnVarlenFunc = _varlen_function(
    "RingFlashAttnVarlenFunc", "contiguous", "Packed documents, each split contiguously over all ranks."
)
ZigZagRingFlashAttnVarlenFunc = _varlen_function(
    "ZigZagRingFlashAttnVarlenFunc", "zigzag", "Packed documents, each split in zigzag over all ranks."
)


# -- entry points ------------------------------------------------------------------------------------------


def _dense(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The plain, kvpacked and qkvpacked entry points of a Function."""

    def plain(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
        attn_type=None,
        attn_processor=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, *masks, return_attn_probs, group, attn_type, attn_processor)

    def kvpacked(q, kv, *args, **keywords):
        return plain(q, *unpack("kv", kv, 2, 2), *args, **keywords)

    def qkvpacked(qkv, *args, **keywords):
        return plain(*unpack("qkv", qkv, 2, 3), *args, **keywords)

    return named(name, plain, kvpacked, qkvpacked, "``[B, T, H, D]``")


def _varlen(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The varlen entry points of a Function."""

    def plain(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, cu_seqlens, max_seqlen, *masks, return_attn_probs, group)

    def kvpacked(q, kv, *args, **keywords):
        return plain(q, *unpack("kv", kv, 1, 2), *args, **keywords)

    def qkvpacked(qkv, *args, **keywords):
        return plain(*unpack("qkv", qkv, 1, 3), *args, **keywords)

    return named(name, plain, kvpacked, qkvpacked, "``[T, H, D]``")


def named(
    name: str, plain: Callable, kvpacked: Callable, qkvpacked: Callable, shape: str, whose: str = "yunchang"
) -> tuple:
    """The three entry points with upstream's names and signatures."""
    packing = {
        "": (plain, ""),
        "kvpacked_": (kvpacked, ", k and v in one tensor"),
        "qkvpacked_": (qkvpacked, ", packed"),
    }
    first = {"": ("q", "k", "v"), "kvpacked_": ("q", "kv"), "qkvpacked_": ("qkv",)}
    own = list(inspect.signature(plain).parameters.values())[3:]
    for infix, (f, how) in packing.items():
        tensors = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in first[infix]]
        f.__signature__ = inspect.Signature([*tensors, *own])
        f.__name__ = f.__qualname__ = f"{name}_{infix}func"
        f.__doc__ = f"{whose}'s {f.__name__} over ring_la; tensors {shape}{how}."
    return plain, kvpacked, qkvpacked


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _dense(
    RingFlashAttnFunc, "ring_flash_attn"
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _dense(
    ZigZagRingFlashAttnFunc, "zigzag_ring_flash_attn"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _dense(
    StripeFlashAttnFunc, "stripe_flash_attn"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen(
    RingFlashAttnVarlenFunc, "ring_flash_attn_varlen"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen(ZigZagRingFlashAttnVarlenFunc, "zigzag_ring_flash_attn_varlen")

ring_pytorch_attn_func = ring_flash_attn_func
RING_IMPL_DICT = {
    "basic": ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
    "strip": stripe_flash_attn_func,
    "basic_pytorch": ring_pytorch_attn_func,
}
RING_IMPL_QKVPACKED_DICT = {
    "basic": ring_flash_attn_qkvpacked_func,
    "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
    "strip": stripe_flash_attn_qkvpacked_func,
}
KINDS = {"basic": "contiguous", "zigzag": "zigzag", "strip": "stripe", "basic_pytorch": "contiguous"}
"""The split that each ring_impl_type expects."""


def install() -> Callable[[], None]:
    """Put ring_la's functions into the installed yunchang's tables; returns what takes them out again."""
    from yunchang.hybrid import utils

    before = [(table, dict(table)) for table in (utils.RING_IMPL_DICT, utils.RING_IMPL_QKVPACKED_DICT)]
    utils.RING_IMPL_DICT.update(RING_IMPL_DICT)
    utils.RING_IMPL_QKVPACKED_DICT.update(RING_IMPL_QKVPACKED_DICT)

    def uninstall() -> None:
        for table, contents in before:
            table.clear()
            table.update(contents)

    return uninstall
