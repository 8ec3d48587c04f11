"""A stand-in for flash_attn's interface where there is no GPU: the same functions in plain PyTorch, so that code
written around them runs on a CPU. What is judged then is that code: exchange, masks and merging, not the kernels."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import torch
from torch import Tensor


def _seen(Tq: int, Tk: int, causal: bool, left: int, right: int) -> Tensor:
    apart = torch.arange(Tk) - torch.arange(Tq)[:, None] - (Tk - Tq)
    right = 0 if causal else right
    return ((apart >= -left) | (left < 0)) & ((apart <= right) | (right < 0))


def _wide(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def _scores(q, k, scale, causal, left, right) -> Tensor:
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, _wide(k, q))
    return scores.masked_fill(~_seen(q.shape[1], k.shape[1], causal, left, right), -torch.inf)


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
                        softcap=0.0, alibi_slopes=None, return_softmax=False):  # fmt: skip
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("the stand-in knows no dropout, softcap or slopes")
    dtype, (q, k, v) = q.dtype, (x.float() for x in (q, k, v))  # FlashAttention adds up in fp32
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, _wide(v, q)).to(dtype), lse, None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                         window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                         deterministic=False, rng_state=None):  # fmt: skip
    """With the lse and output that are given, as FlashAttention does: those of all keys, where a ring gives them."""
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = softmax_lse.masked_fill(softmax_lse.isneginf(), 0.0)
    weights = (scores - lse[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dout, _wide(v, q))
    delta = (dout * out).sum(-1).transpose(1, 2)
    ds = softmax_scale * weights * (dp - delta[..., None])
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, _wide(k, q)))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, groups).sum(3))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", weights, dout).unflatten(2, groups).sum(3))
    return delta


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                               softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                               alibi_slopes=None, return_softmax=False, block_table=None):  # fmt: skip
    outs, lses = [], []
    for (a, b), (c, d) in _documents(cu_seqlens_q, cu_seqlens_k):
        how = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        out, lse, _, _ = _flash_attn_forward(q[None, a:b], k[None, c:d], v[None, c:d], *how)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1), None, None


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
                                window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
                                rng_state=None):  # fmt: skip
    for (a, b), (c, d) in _documents(cu_seqlens_q, cu_seqlens_k):
        inputs = dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b], softmax_lse[None, :, a:b]
        how = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        _flash_attn_backward(*inputs, dq[None, a:b], dk[None, c:d], dv[None, c:d], *how)


def _documents(cu_q: Tensor, cu_k: Tensor) -> list:
    q, k = cu_q.tolist(), cu_k.tolist()
    return list(zip(zip(q, q[1:]), zip(k, k[1:])))


def install() -> None:
    """Let ``import flash_attn`` find this, where there is no CUDA device."""
    if torch.cuda.is_available() or "flash_attn" in sys.modules:
        return
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)
    package = types.ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.__version__, package.flash_attn_interface = "2.8.3", interface  # type: ignore[attr-defined]
    package.flash_attn_func = package.flash_attn_varlen_func = None  # type: ignore[attr-defined]
    adapters = types.ModuleType("ring_flash_attn.adapters")  # imports what Transformers 5 has no more
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules["ring_flash_attn.adapters"] = adapters
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
