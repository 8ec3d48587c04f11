"""Forgetting attention: softmax attention whose scores fall by what each head forgets between key and query.

    s_ij = scale · q_iᵀ k_j + c_i − c_j,       c = Σ g along the document

The sums ride as further channels of q and k, so that every strategy of `attention` takes them along (`sums`).
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from .. import reference
from ..blockwise import by_block
from ..checks import check_scale, check_split, is_floats, is_int
from ..choices import SoftmaxBackend
from ..context import ShardedLayout, check_together
from ..context.handle import found
from ..context.operator import SplitOperator
from ..errors import ArgumentError, Facts, describe_tensor
from ..outputs import AttentionOutput
from ..running_sum import running_sum
from .door import attend, autocast, under_autocast
from .merging import wide
from .options import AttentionOptions
from .sums import with_sums
from .tensors import Tensors


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    window: int = -1,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    backend: SoftmaxBackend | None = None,
) -> AttentionOutput:
    """Forgetting attention (FoX; Lin et al. 2025, arXiv 2503.02130, eq. 4): causal softmax attention with a decay.

        s_ij = scale · q_iᵀ k_j + Σ_{j < t ≤ i} g_t

    Args:
        q: ``[B, T, H, K]``. k: ``[B, T, Hk, K]``. v: ``[B, T, Hk, V]``, H a multiple of Hk (keys and values are then
            repeated for the heads they serve).
        g: log forget gate ``[B, T, H]``, ≤ 0, of any float dtype; give it in fp32.
        scale: multiplies ``qᵀk``; None: K**-0.5. window: earlier tokens a token sees; −1: all.
        layout: how the sequence is split over ranks, in runs of tokens; T is then this rank's length. Collective.
        cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device.
        backend: as in `attention`.

    Returns:
        AttentionOutput(o ``[B, T, H, V]`` in q's dtype, lse ``[B, H, T]``), both differentiable, once.

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
    """
    split = torch.compiler.is_compiling() and cu_seqlens is None and backend != "reference"
    if split and isinstance(layout, ShardedLayout):
        return AttentionOutput(*_operator(q, k, v, g, layout.number, scale, window, backend))
    check = functools.partial(_check, q, k, v, g, scale, window, layout, cu_seqlens)
    check_together("forgetting_attention", layout, check, functools.partial(_facts, g=g, q=q, k=k))
    where = {"layout": layout, "cu_seqlens": cu_seqlens}
    if backend == "reference":
        return _by_reference(q, k, v, g, dict(scale=scale, window=window) | where)
    return _with_sums(q, k, v, g, scale, dict(window=(window, -1), backend=backend), where)


def _facts(**tensors: Tensor) -> tuple[tuple[str, object], ...]:
    """What ranks compare of tensors whose tokens are split."""
    return tuple((name, Facts.of(x, 1)) for name, x in tensors.items())


def _by_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, how: dict[str, Any]) -> AttentionOutput:
    """The fp64 truth, in the dtypes of the other backends."""
    out = reference.forgetting_attention(q, k, v, g, **how)
    return AttentionOutput(out.o.to(q.dtype), out.lse.to(torch.promote_types(q.dtype, torch.float32)))


def _with_sums(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None, how: dict[str, Any], where: dict[str, Any]
) -> AttentionOutput:
    """By `attention`, whose q and k have sums of g in further channels."""
    (H, K), layout = q.shape[2:], where["layout"]
    scale = K**-0.5 if scale is None else float(scale)
    if under_autocast(q):
        q, k, v = autocast(q, k, v)
    if scale == 0:  # sums are counted in it
        q, scale = q * 0, 1.0
    sums = running_sum(g.double() / scale, **where)
    k, v = (x if x.shape[2] == H else by_block(functools.partial(_to_heads, H=H), x, layout=layout) for x in (k, v))
    q, k = with_sums(q, k, sums, exact=True)
    return attention_with_sums(q, k, v, K, scale=scale, **how, **where)


def attention_with_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: int,
    *,
    layout: ShardedLayout | None = None,
    **options: Any,
) -> AttentionOutput:
    """`attention` of q and k that have sums behind so many channels, by a kernel that is told."""
    return attend(Tensors(q, k, v), AttentionOptions(sums=sums, **options), layout)


def _to_heads(x: Tensor, H: int) -> Tensor:
    """Keys or values ``[B, T, Hk, …]`` of every query head."""
    return x.repeat_interleave(H // x.shape[2], 2)


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    layout: int,
    scale: float | None,
    window: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """A split call by its layout's number."""
    kernel = cast("SoftmaxBackend | None", backend)
    out = forgetting_attention(q, k, v, g, scale=scale, window=window, layout=found(layout), backend=kernel)
    return out.o, out.lse


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=wide(q.dtype))


_operator = SplitOperator("split_forgetting_attention", _whole, _fake, 4)
"""What a compiled graph has of a split call."""


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: object, window: object, layout: object, cu_seqlens: object
) -> None:  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_floats(x, 4):
            raise ArgumentError(name, "a dense float tensor [B, T, H, D]", describe_tensor(x))
        if x.dtype != q.dtype and not under_autocast(q):
            raise ArgumentError(name, f"{q.dtype}, the dtype of q", x.dtype)
    (B, T, H, K), Hk = q.shape, k.shape[2]
    if not K or not Hk or H % Hk:
        raise ArgumentError("q", f"at least one channel, and heads that are a multiple of the {Hk} of k", list(q.shape))
    if list(k.shape) != [B, T, Hk, K]:
        raise ArgumentError("k", f"{[B, T, Hk, K]} beside q of shape {list(q.shape)}", list(k.shape))
    if list(v.shape[:3]) != [B, T, Hk]:
        raise ArgumentError("v", f"[B, T, Hk, V] with B={B}, T={T}, Hk={Hk}", list(v.shape))
    if not is_floats(g) or g.shape != q.shape[:3]:
        raise ArgumentError("g", f"a dense float tensor {[B, T, H]}", describe_tensor(g))
    for name, x in (("k", k), ("v", v), ("g", g)):
        if x.device != q.device:
            raise ArgumentError(name, f"a tensor on {q.device}, where q is", x.device)
    check_scale(scale)
    if not is_int(window, -1):
        raise ArgumentError("window", "an int, earlier tokens that a token sees, or −1", repr(window))
    if isinstance(layout, ShardedLayout):
        layout.require_runs("forgetting attention")
    check_split(T, B, layout, cu_seqlens, q.device, "q")
