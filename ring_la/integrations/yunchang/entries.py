"""yunchang's entry points over the Functions, and its tables of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ArgumentError, describe_tensor
from .functions import (
    RingFlashAttnFunc,
    RingFlashAttnVarlenFunc,
    StripeFlashAttnFunc,
    ZigZagRingFlashAttnFunc,
    ZigZagRingFlashAttnVarlenFunc,
)


def unpack(name: str, x: object, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked along `dim`."""
    if not isinstance(x, Tensor) or x.dim() != dim + 3 or x.shape[dim] != count:
        shape = f"[{'B, T' if dim == 2 else 'T'}, {count}, H, D]"
        raise ArgumentError(name, f"a tensor {shape}", describe_tensor(x))
    return x.unbind(dim)


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
