"""yunchang's autograd Functions; see the package for their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...softmax.merging import wide
from ...softmax.plan import Saved
from ...softmax.tensors import Tensors
from .call import Masks, UpstreamCall, checked, group_of, settled
from .ctx import others, recall, remember
from .packed import check_packed, varlen_backward, varlen_forward


def _forward(
    ctx: Any,
    call: UpstreamCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    attn_type: Any,
    attn_processor: Any,
) -> tuple[Tensor, Tensor]:
    k, v = k.contiguous(), v.contiguous()
    x = Tensors(q, k, v)
    out, lse, _ = call.plan(x, group_of(group)).forward(x)
    ctx.save_for_backward(q, k, v, out, lse)
    remember(ctx, call, group, attn_type, attn_processor)
    return out, lse


def _backward(ctx: Any, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for as many inputs as the forward had, q, k and v first."""
    q, k, v, out, lse = ctx.saved_tensors[:5]
    call, x = recall(ctx, kind), Tensors(q, k, v)
    saved = Saved(x, out, lse.to(wide(q.dtype)))
    grads = call.plan(x, group_of(ctx.group)).backward(saved, dout, dlse)
    return grads.q, grads.k, grads.v, *others(ctx)


def _dense_function(name: str, kind: str, doc: str) -> type[torch.autograd.Function]:
    """A Function over q, k and v ``[B, T, H, D]``."""

    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        group: dist.ProcessGroup | None,
        attn_type: Any = None,
        attn_processor: Any = None,
    ) -> Any:
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        call = settled(
            [group_of(group)], (q, k, v), lambda: checked(kind, Tensors(q, k, v), masks, attn_type, return_softmax)
        )
        out, lse = _forward(ctx, call, q, k, v, group, attn_type, attn_processor)
        return (out, lse, None) if return_softmax else out

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *args: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, kind, dout, args[0] if args else None)

    return _function(name, kind, doc, forward, backward)


def _varlen_function(name: str, kind: str, doc: str) -> type[torch.autograd.Function]:
    """A Function over packed documents ``[T, H, D]``."""

    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        group: dist.ProcessGroup | None,
    ) -> Any:
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)

        def make() -> UpstreamCall:
            call = checked(kind, Tensors(q[None], k[None], v[None]), masks, None, return_softmax)
            check_packed(cu_seqlens, max_seqlen, q, k)
            return call

        offsets = tuple(cu_seqlens.tolist()) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        call = settled([group_of(group)], (q, k, v), make, packed=True, cu_seqlens=offsets)
        out, lse = varlen_forward(ctx, call, q, k, v, cu_seqlens, max_seqlen, group)
        return (out, lse, None) if return_softmax else out

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *args: Tensor | None) -> tuple[Tensor | None, ...]:
        return varlen_backward(ctx, kind, dout, args[0] if args else None)

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
