"""What indexers refuse, by name, and what ranks compare of their calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import check_offsets, check_scale, is_floats
from ..context import ShardedLayout, check_together
from ..errors import ArgumentError, Facts, UnsupportedError, describe_tensor
from ..kernels.choice import triton_installed

Given = dict[str, tuple[object, int]]
"""An indexer's tensors by name, the first of them queries, and how many dimensions each is to have."""
Where = tuple[object, object]
"""A call's layout and offsets."""


def checked(call: str, given: Given, where: Where, check: Callable[[], None], **counts: object) -> None:
    """Refuse, on every rank, what does not fit.

    Args:
        given: the tensors, whose second dimension is tokens. where: layout and cu_seqlens.
        check: what is left to refuse when these are tensors. counts: ints of at least 1, alike on all ranks.
    """
    layout, cu_seqlens = where

    def all_of_it() -> None:
        for name, (x, dims) in given.items():
            if not is_floats(x, dims):
                raise ArgumentError(name, f"a float tensor of {dims} dimensions", describe_tensor(x))
        name, (q, _) = next(iter(given.items()))
        assert isinstance(q, Tensor)
        for other, (x, _) in given.items():
            assert isinstance(x, Tensor)
            if x.device != q.device:
                raise ArgumentError(other, f"a tensor on {q.device}, where {name} is", x.device)
        for other, n in counts.items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ArgumentError(other, "an int ≥ 1", repr(n))
        check()
        _check_place(name, q, layout, cu_seqlens)

    def brought() -> tuple[tuple[str, object], ...]:
        facts = [(n, Facts.of(x, 1)) for n, (x, _) in given.items() if isinstance(x, Tensor)]
        return (*facts, *counts.items(), ("gradients", torch.is_grad_enabled()))

    check_together(call, layout, all_of_it, brought)


def _check_place(name: str, q: Tensor, layout: object, cu_seqlens: object) -> None:
    """Refuse a layout or offsets that do not fit the tokens of `q`."""
    if layout is None:
        if not q.shape[1]:
            raise ArgumentError(name, "at least one token", list(q.shape))
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, q.shape[0], q.shape[1], q.device)
        return
    if not isinstance(layout, ShardedLayout):
        raise ArgumentError("layout", "a layout made by ContextParallel.layout, or None", type(layout).__name__)
    if cu_seqlens is not None:
        raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
    if q.device != layout.cp.device:
        raise ArgumentError("layout", f"one whose group works on {q.device}, where {name} is", layout.cp.device)
    layout.require_local(name, q.shape[1])
    if layout.packed and len(q) != 1:
        raise ArgumentError("layout", f"one without packed documents for a batch of {len(q)}", repr(layout))


def check_index(q: Tensor, k: Tensor, w: Tensor, longer: bool = False) -> None:
    """Refuse shapes of the lightning indexer's tensors; `longer`: keys may be of more tokens."""
    B, T, heads, D = q.shape
    tokens = k.shape[1] if longer and k.shape[1] > T else T
    if list(k.shape) != [B, tokens, D] or k.dtype != q.dtype:
        raise ArgumentError("k", f"{q.dtype} [B, T, D] = [{B}, {T}, {D}]", describe_tensor(k))
    if list(w.shape) != [B, T, heads]:
        raise ArgumentError("w", f"[B, T, Hi] = [{B}, {T}, {heads}]", list(w.shape))


def check_choice(q: Tensor, k: Tensor, w: Tensor, backend: object, fp8: object, longer: bool) -> None:
    """Refuse what the lightning indexer's choice does not take."""
    check_index(q, k, w, longer)
    if backend not in (None, "torch", "triton"):
        raise ArgumentError("backend", "None, torch or triton", repr(backend))
    if not isinstance(fp8, bool):
        raise ArgumentError("fp8", "True or False", repr(fp8))
    if backend == "triton" and not (triton_installed() and q.dtype != torch.float64):
        raise UnsupportedError("backend", "Triton, and numbers of at most 32 bits", repr(backend), "'torch' does it")
    if fp8 and q.dtype == torch.float64:
        raise UnsupportedError("fp8", "numbers of at most 32 bits", q.dtype, "Leave it out")


def check_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    chosen: object,
    attention_q: Tensor,
    attention_k: Tensor,
    attention_lse: object,
    scale: object,
    backend: object,
) -> None:
    """Refuse what the indexer's loss does not take."""
    check_index(q, k, w)
    (B, T), K = q.shape[:2], attention_q.shape[3]
    for name, x in (("attention_q", attention_q), ("attention_k", attention_k)):
        heads = x.shape[2]
        if list(x.shape[:2]) != [B, T] or x.shape[3] != K or not heads or attention_q.shape[2] % heads:
            raise ArgumentError(name, f"[B, T, heads, K] with B={B}, T={T}, K={K}", list(x.shape))
    if attention_k.dtype != attention_q.dtype:
        raise ArgumentError("attention_k", f"{attention_q.dtype}, as attention_q", attention_k.dtype)
    wanted = [B, attention_q.shape[2], T]
    if attention_lse is not None and (not isinstance(attention_lse, Tensor) or list(attention_lse.shape) != wanted):
        raise ArgumentError("attention_lse", f"None or [B, H, T] = {wanted}", describe_tensor(attention_lse))
    places = isinstance(chosen, Tensor) and chosen.dtype in (torch.int32, torch.int64) and chosen.dim() == 4
    if not places or list(chosen.shape[:3]) != [B, T, 1]:  # type: ignore[attr-defined]
        raise ArgumentError("chosen", f"int32 or int64 [B, T, 1, S] with B={B}, T={T}", describe_tensor(chosen))
    check_scale(scale)
    if backend not in (None, "torch", "triton"):
        raise ArgumentError("backend", "None, torch or triton", repr(backend))
    if backend == "triton" and not loss_in_one_kernel(q, attention_q, attention_k):
        what = "Triton, 16-bit numbers, at most 64 heads, channels up to 128 and 576, and one head of attention_k"
        raise UnsupportedError("backend", what, repr(backend), "'torch' does it")


def pooled(pool: Callable[[Tensor, Tensor], Tensor], means: Tensor, first: Tensor, layout: object) -> Tensor:
    """What queries are compared with, ``[B, blocks, D]`` like the means. Wrong on one rank, all refuse it."""

    def check() -> Tensor:
        y = pool(means, first) if callable(pool) else pool
        if not is_floats(y, 3) or y.shape != means.shape or y.device != means.device:
            expected = f"None or a function that makes {list(means.shape)} of means, on {means.device}"
            raise ArgumentError("pool", expected, describe_tensor(y))
        return y

    return check_together("the pool of full_block_index", layout, check, lambda: (("channels", means.shape[2]),))


def loss_in_one_kernel(q: Tensor, attention_q: Tensor, attention_k: Tensor) -> bool:
    """Whether the indexer's loss has a kernel for such tensors."""
    half = all(x.dtype in (torch.float16, torch.bfloat16) for x in (q, attention_q))
    heads = max(q.shape[2], attention_q.shape[2])
    sizes = heads <= 64 and q.shape[3] <= 128 and attention_q.shape[3] <= 576
    return triton_installed() and half and sizes and attention_k.shape[2] == 1
