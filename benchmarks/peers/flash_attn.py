"""flash_attn for peers where it is not installed: its private entry points over PyTorch's FlashAttention-2.

ring-flash-attn and yunchang take these functions when they are imported. The stand-in can be imported within
`flash_attn` alone; after it, `import flash_attn` fails in this process as before.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@contextmanager
def flash_attn() -> Iterator[None]:
    """Within, flash_attn can be imported: the library, or where it is absent the stand-in."""
    if importlib.util.find_spec("flash_attn") is not None:
        yield
        return
    modules = {module.__name__: module for module in stand_ins()}
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def stand_ins() -> list[ModuleType]:
    """flash_attn, its interface, and in place of ring-flash-attn's adapters, which need more of it, none."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.__path__ = "2.8.3", []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(package, name, _absent)
        setattr(interface, name, _absent)
    interface._flash_attn_forward, interface._flash_attn_backward = _forward, _backward
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = _varlen_forward, _varlen_backward
    package.flash_attn_interface = interface
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = _absent
    modules = [package, interface, adapters]
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    return modules


def _absent(*_, **__):
    raise NotImplementedError("not part of this benchmark")


def _bounds(left: int, right: int) -> dict:
    return dict(window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right)


def _forward(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    return _varlen_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size_left,
        window_size_right,
    )  # fmt: skip


def _varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    o, lse, rng, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, False,
        scale=softmax_scale, **_bounds(window_size_left, window_size_right),
    )  # fmt: skip
    return o, lse, None, rng


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    _varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale,
        causal, window_size_left, window_size_right,
    )  # fmt: skip


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The state of a random generator that nothing is drawn from."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        *_no_dropout(q.device), scale=softmax_scale,
        **_bounds(window_size_left, window_size_right),
    )  # fmt: skip
    for into, grad in zip((dq, dk, dv), grads):
        into.copy_(grad)
