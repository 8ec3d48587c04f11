"""yunchang's entry points over the Functions, and its tables of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Group
from ...errors import ArgumentError, describe_tensor
from .call import group_of, refuse
from .functions import (
    RingFlashAttnFunc,
    RingFlashAttnVarlenFunc,
    StripeFlashAttnFunc,
    ZigZagRingFlashAttnFunc,
    ZigZagRingFlashAttnVarlenFunc,
)


def unpack(name: str, x: object, dim: int, count: int, groups: Sequence[Group]) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked along `dim`, or an error on every rank of `groups`."""
    if isinstance(x, Tensor) and x.dim() == dim + 3 and x.shape[dim] == count:
        return x.unbind(dim)
    shape = f"[{'B, T' if dim == 2 else 'T'}, {count}, H, D]"
    refuse(groups, ArgumentError(name, f"a tensor {shape}", describe_tensor(x)))


def packing(name: str, plain: Callable, dim: int, whose: str = "yunchang") -> tuple[Callable, Callable, Callable]:
    """`plain`, and the same for k and v, or all three, stacked along `dim`, under upstream's names."""
    of = inspect.signature(plain)

    def parts(what: str, x: object, count: int, args: tuple, keywords: dict) -> tuple[Tensor, ...]:
        given = of.bind(None, None, None, *args, **keywords).arguments
        return unpack(what, x, dim, count, [group_of(given.get("group"))])

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **keywords: Any) -> Any:
        return plain(q, *parts("kv", kv, 2, args, keywords), *args, **keywords)

    def qkvpacked(qkv: Tensor, *args: Any, **keywords: Any) -> Any:
        return plain(*parts("qkv", qkv, 3, args, keywords), *args, **keywords)

    shape = "``[T, H, D]``" if dim == 1 else "``[B, T, H, D]``"
    return named(name, plain, kvpacked, qkvpacked, shape, whose)


def _dense(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The plain, kvpacked and qkvpacked entry points of a Function."""

    def plain(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
        attn_type: Any = None,
        attn_processor: Any = None,
    ) -> Any:
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, *masks, return_attn_probs, group, attn_type, attn_processor)

    return packing(name, plain, 2)


def _varlen(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The varlen entry points of a Function."""

    def plain(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Any:
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, cu_seqlens, max_seqlen, *masks, return_attn_probs, group)

    return packing(name, plain, 1)


def named(name: str, plain: Callable, kvpacked: Callable, qkvpacked: Callable, shape: str, whose: str) -> tuple:
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
        f.__signature__ = inspect.Signature([*tensors, *own])  # type: ignore[attr-defined]
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
