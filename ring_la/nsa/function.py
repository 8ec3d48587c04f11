"""`nsa`: its arguments, and its three branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..autograd import traced
from ..checks import check_int, check_offsets, check_scale, is_floats
from ..choices import AttentionChoice, SoftmaxBackend
from ..context import ShardedLayout, check_together
from ..errors import ArgumentError, Facts, UnsupportedError, describe_tensor
from ..indexers.chosen import Rows
from ..outputs import NSAOutput
from ..softmax import attention, sparse_attention
from ..softmax.door import autocast, under_autocast
from . import operators
from .choice import Sizes, choose_blocks
from .compressed import BlockMap, Compressed, mapped


def nsa(
    q: Tensor,
    k: tuple[Tensor, Tensor, Tensor],
    v: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    compress_k: BlockMap,
    compress_v: BlockMap,
    *,
    length: int = 32,
    stride: int = 16,
    block: int = 64,
    topk: int = 16,
    initial: int = 1,
    local: int = 2,
    window: int = 512,
    scale: float | None = None,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: AttentionChoice | None = None,
    backend: SoftmaxBackend | None = None,
) -> NSAOutput:
    """Native Sparse Attention (DeepSeek-AI 2025, arXiv 2502.11089, eq. 5 to 12), with exact gradients.

        o_t = g_t1 · Attn(q_t, compressed) + g_t2 · Attn(q_t, chosen blocks) + g_t3 · Attn(q_t, window)

    Compressed: one key and value for each whole block of `length` tokens, one every `stride`, counted from the
    document's first token; a query sees those that end at it or before. Chosen: the `topk` blocks of `block`
    tokens with the most weight among the compressed keys, summed over the query heads of a key head. The choice has no
    gradient.

    Args:
        q: ``[B, Tq, H, K]``. k: those of the three branches, each ``[B, T, Hk, K]``; v: each ``[B, T, Hk, V]``; one
            tensor may serve all three. On one device Tq may be less than T: the last tokens' queries, not packed.
        gates: ``[B, Tq, H, 3]``, the weight of each branch (in the paper a sigmoid).
        compress_k, compress_v: make of blocks ``[B, N, length, Hk, D]`` and the positions ``[N]`` of their first tokens
            in their documents one row each, ``[B, N, Hk, K or V]``. The same on all ranks, of any N, also 0. Gradients
            of their parameters under a layout are this rank's part.
        length, stride, block: `length` and `block` are multiples of `stride`.
        topk: blocks that a query reads, the first `initial` of its document and the last `local` (its own among them)
            in any case: at most `topk` together.
        window: earlier tokens that the third branch sees.
        scale: multiplies ``qᵀk``; None: K**-0.5.
        layout: how the sequence is split; the T are then this rank's. Compressed keys go to every rank. Collective.
        cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device.
        strategy: how keys of the second and third branch travel: "ring", "all_gather", or None.
        backend: None: of each branch the fastest that can do it; "torch", "triton"; "reference": a loop, in fp64, on
            one device.

    Returns:
        NSAOutput(o ``[B, Tq, H, V]`` in q's dtype, chosen int32 ``[B, Tq, Hk, topk]``). Memory goes with T_local ·
        topk · block and with the compressed keys, never T².

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
        DisagreementError: the ranks' arguments do not fit together.
    """
    sizes = Sizes(length, stride, block, topk, initial, local)

    def check() -> None:
        _check(q, k, v, gates, layout, cu_seqlens)
        check_sizes(sizes, window, scale)
        _check_how(layout, strategy, backend)
        for name, given in (("compress_k", compress_k), ("compress_v", compress_v)):
            if not callable(given):
                raise ArgumentError(name, "a function of blocks and positions", type(given).__name__)

    together = None if torch.compiler.is_compiling() else layout
    check_together("nsa", together, check, lambda: _signature(q, k, v, gates, sizes, window, scale, strategy, backend))
    where: dict[str, Any] = dict(layout=layout, cu_seqlens=cu_seqlens)
    if backend == "reference":
        more: dict[str, Any] = sizes._asdict() | dict(window=window, scale=scale)
        out = reference.nsa(q, k, v, gates, compress_k, compress_v, **more, **where)
        return NSAOutput(out.o.to(q.dtype), out.chosen)
    if under_autocast(q):
        q, *both = autocast(q, *k, *v)
        k, v = (both[0], both[1], both[2]), (both[3], both[4], both[5])
    factor = float(q.shape[3] ** -0.5 if scale is None else scale)
    how: dict[str, Any] = dict(scale=factor, backend=backend, **where)
    compressed = _compressed_traced if traced(q, *k, *v, gates) else _compressed
    o, chosen = compressed(q, k[0], v[0], (compress_k, compress_v), sizes, how)
    read = sparse_attention(q, k[1], v[1], chosen, block=sizes.block, strategy=strategy, **how).o
    near = attention(q, k[2], v[2], window=(window, -1), strategy=strategy, **how).o
    weight = gates.to(q.dtype).unsqueeze(-2).unbind(-1)  # each [B, T, H, 1]
    return NSAOutput(weight[0] * o + weight[1] * read + weight[2] * near, chosen)


def _compressed(
    q: Tensor, k: Tensor, v: Tensor, maps: tuple[BlockMap, BlockMap], sizes: Sizes, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """o of the compressed branch, and the choice."""
    layout, scale = how["layout"], how["scale"]
    if layout is None and q.shape[1] < k.shape[1]:
        rows = Rows(k.shape[1], None, None, q.device, q.shape[1])
    else:
        rows = Rows.of(q, layout, how["cu_seqlens"])
    compressed = Compressed.of(sizes.length, sizes.stride, rows)
    few_k, few_v = compressed.everywhere(*_made(compressed, k, v, maps))
    o, lse = compressed.attention(q, few_k, few_v, scale, how["backend"])
    return o, choose_blocks(q, few_k, lse.detach(), scale, sizes, rows, compressed)


def _made(compressed: Compressed, k: Tensor, v: Tensor, maps: tuple[BlockMap, BlockMap]) -> tuple[Tensor, Tensor]:
    """The keys and values of this rank's blocks. What one rank's map does wrong all refuse."""
    blocks = compressed.blocks(k, v)
    made: list[Tensor] = []

    def check() -> None:
        made.extend(mapped(blocks, *maps, compressed.positions))

    names = "compress_k", "compress_v"
    check_together("nsa", compressed.layout, check, lambda: tuple((n, Facts.of(x, 1)) for n, x in zip(names, made)))
    return made[0], made[1]


def _compressed_traced(
    q: Tensor, k: Tensor, v: Tensor, maps: tuple[BlockMap, BlockMap], sizes: Sizes, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`_compressed` for who sees single operators: the caller's maps between two of them."""
    layout, cu_seqlens = how["layout"], how["cu_seqlens"]
    number, total = 0 if layout is None else layout.number, k.shape[1]
    most = operators.room(k, sizes.stride, layout, cu_seqlens)
    *blocks, positions = operators.nsa_blocks(k, v, cu_seqlens, number, q.shape[1], sizes.length, sizes.stride, most)
    few_k, few_v = mapped((blocks[0], blocks[1]), *maps, positions)
    o, chosen = operators.nsa_compressed(
        q, few_k, few_v, cu_seqlens, number, total, list(sizes), how["scale"], how["backend"]
    )
    return o, chosen


# -- checks and agreement ----------------------------------------------------------------------------------


def _check(q: Any, k: Any, v: Any, gates: Any, layout: Any, cu_seqlens: Any) -> None:
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, (tuple, list)) or len(x) != 3:
            raise ArgumentError(name, "three tensors, one for each branch", describe_tensor(x))
    for name, x in (("q", q), *(("k", x) for x in k), *(("v", x) for x in v), ("gates", gates)):
        if not is_floats(x, 4):
            raise ArgumentError(name, "dense float tensors of four dimensions", describe_tensor(x))
        if x.device != q.device:
            raise ArgumentError(name, f"tensors on {q.device}, where q is", x.device)
    if q.is_meta:
        raise UnsupportedError("q", "a tensor with values, by which blocks are chosen", "one on the meta device")
    (B, Tq, H, K), (T, Hk), V = q.shape, k[0].shape[1:3], v[0].shape[3]
    if layout is None and not Tq:
        raise ArgumentError("q", "at least one token", list(q.shape))
    if not Hk or not H or H % Hk:
        raise ArgumentError("q", f"a number of heads that is a multiple of the {Hk} of k", H)
    for name, given, width in (("k", k, K), ("v", v, V)):
        for x in given:
            if list(x.shape) != [B, T, Hk, width] or x.dtype != q.dtype:
                raise ArgumentError(name, f"{q.dtype} {[B, T, Hk, width]}", f"{x.dtype} {list(x.shape)}")
    if list(gates.shape) != [B, Tq, H, 3]:
        raise ArgumentError("gates", f"[B, Tq, H, 3] = {[B, Tq, H, 3]}", list(gates.shape))
    if layout is not None and not isinstance(layout, ShardedLayout):
        raise ArgumentError("layout", "a layout made by ContextParallel.layout, or None", type(layout).__name__)
    if layout is not None or cu_seqlens is not None:
        if Tq != T:
            raise ArgumentError("q", f"the {T} tokens of k, where they are split or packed", Tq)
        if layout is None:
            check_offsets(cu_seqlens, B, T, q.device)
        elif cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
        elif not torch.compiler.is_compiling():  # within a graph the operator asks
            layout.require_local("q", Tq)
    elif Tq > T:
        raise ArgumentError("q", f"at most the {T} tokens of k", Tq)


def _check_how(layout: object, strategy: object, backend: object) -> None:
    """Refuse what one of the branches does not know."""
    if strategy not in (None, "auto", "ring", "all_gather"):
        raise ArgumentError("strategy", "None, auto, ring or all_gather", repr(strategy))
    if backend not in (None, "torch", "triton", "reference"):
        raise ArgumentError("backend", "None, torch, triton or reference", repr(backend))
    if backend == "reference" and layout is not None:
        raise UnsupportedError("backend", "a kernel with a layout", "'reference'", "It runs on one device")


def check_sizes(sizes: Sizes, window: object, scale: object = None) -> None:
    """Refuse sizes that do not fit each other."""
    for name, n in zip(sizes._fields, sizes):
        check_int(name, n, 0 if name == "initial" else 1)
    for name in ("length", "block"):
        if getattr(sizes, name) % sizes.stride:
            raise ArgumentError(name, f"a multiple of stride = {sizes.stride}", getattr(sizes, name))
    if sizes.initial + sizes.local > sizes.topk:
        raise ArgumentError("topk", f"at least initial + local = {sizes.initial + sizes.local}", sizes.topk)
    check_int("window", window, 0)
    check_scale(scale)


def _signature(q: Tensor, k: Any, v: Any, gates: Tensor, *flags: object) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name."""
    tensors = [("q", q), *(("k", x) for x in k), *(("v", x) for x in v), ("gates", gates)]
    facts = tuple((name, Facts.of(x, 1)) for name, x in tensors)
    names = "sizes", "window", "scale", "strategy", "backend"
    return (*facts, *zip(names, flags), ("gradients", torch.is_grad_enabled()))
