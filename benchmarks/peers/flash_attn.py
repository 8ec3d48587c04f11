"""flash_attn as `bench attention` lends it to its peers: its private entry points over any of our kernels.

ring-flash-attn, yunchang and xfuser take these functions when they are imported. The stand-in can be imported within
`flash_attn` alone; after it, `import flash_attn` is as before. `use` says which kernel the functions run on, so that a
peer is compared with us on the same one.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor

from ring_la.softmax.backends import BACKENDS, QueryRows, TileBackend
from ring_la.softmax.backends.packs import Pack, Side
from ring_la.softmax.backends.varlen import VarlenBackend, Window
from ring_la.softmax.geometry import Tile
from ring_la.softmax.scores import Scores

_used = ["flash"]


def use(kernel: str) -> None:
    """Run the lent functions on this kernel of ours from now on: any that does plain rectangles."""
    _used[0] = kernel


@contextmanager
def flash_attn() -> Iterator[None]:
    """Within, flash_attn is the stand-in."""
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


def _kernel() -> TileBackend:
    kernel = BACKENDS[_used[0]]
    assert isinstance(kernel, TileBackend)
    return kernel


def _mask(causal: bool, left: int, right: int) -> Window:
    """Causal with a bound on the left is a window of nothing on the right."""
    return Window(False, left, 0) if causal and left >= 0 else Window(causal, left, -1 if causal else right)


def _tile(q: Tensor, k: Tensor, window: Window) -> Tile:
    """For kernels without windows."""
    if (window.causal and q.shape[1] != k.shape[1]) or max(window.left, window.right) >= 0:
        raise NotImplementedError(f"{_used[0]} has no such mask")
    return Tile(0, q.shape[1], 0, k.shape[1], hi=0 if window.causal else None)


def _scores(q: Tensor, scale: float | None, softcap: float | None) -> Scores:
    return Scores(q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0)


def _forward(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    kernel, window = _kernel(), _mask(causal, window_size_left, window_size_right)
    tensors, scores = (q, k, v), _scores(q, softmax_scale, softcap)
    if isinstance(kernel, VarlenBackend):
        o, lse = kernel.call(*tensors, scores, window, None)
    else:
        o, lse = kernel.tile_forward(*tensors, scores, _tile(q, k, window))
    return o, lse, None, None


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    kernel, window = _kernel(), _mask(causal, window_size_left, window_size_right)
    rows, scores = QueryRows(q, out, dout, softmax_lse.contiguous()), _scores(q, softmax_scale, softcap)
    if isinstance(kernel, VarlenBackend):
        grads = kernel.call_backward(rows, k, v, scores, window, None)
    else:
        grads = kernel.tile_backward(rows, k, v, scores, _tile(q, k, window))
    _give(grads, (dq, dk, dv))


def _pack(window: Window, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int) -> Pack:
    return Pack(window, Side(slice(None), cu_q, longest_q), Side(slice(None), cu_k, longest_k))


def _varlen(kernel: TileBackend) -> VarlenBackend:
    if not isinstance(kernel, VarlenBackend):
        raise NotImplementedError(f"{kernel.name} takes no packed documents")
    return kernel


def _varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    window = _mask(causal, window_size_left, window_size_right)
    pack = _pack(window, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scores = _scores(q, softmax_scale, softcap)
    o, lse = _varlen(_kernel()).call(q[None], k[None], v[None], scores, window, pack)
    return o[0], lse[0], None, None


def _varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    window = _mask(causal, window_size_left, window_size_right)
    pack = _pack(window, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rows = QueryRows(q[None], out[None], dout[None], softmax_lse[None].contiguous())
    scores = _scores(q, softmax_scale, softcap)
    grads = _varlen(_kernel()).call_backward(rows, k[None], v[None], scores, window, pack)
    _give([g[0] for g in grads], (dq, dk, dv))


def _give(grads, into) -> None:
    """Gradients where the caller wants them: one more copy than flash-attn's own functions need."""
    for room, grad in zip(into, grads):
        room.copy_(grad)
