"""Log-linear attention: linear attention with a state a level of a Fenwick tree, and weights of levels.

    o_t = scale · Σ_{s ≤ t} λ_t[ℓ(t, s)] e^{c_t − c_s} (q_tᵀ k_s) v_s,     c = Σ g,     ℓ(t, s) = bits of t xor s

Tokens of level ℓ are the left half of the block of 2^ℓ positions, counted in the document, in whose right half t
stands. Inside a run of tokens they are `kernels/fenwick`'s. Between ranks travels what token p of a document finds: a
state each level at which p has a bit. A run of tokens moves levels into others and lets them decay, which is a matrix
of levels: the dense transition of `algebra`, on states ``[levels, K·V]``. So one exchange sends log2 T states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import full_precision
from .blockwise import fixed
from .checks import FLOATS, check_scale, check_split
from .context import ShardedLayout, check_together
from .context.handle import layout_of, number_of
from .context.operator import SplitOperator
from .errors import ArgumentError, Facts, UnsupportedError, describe_tensor
from .kernels.fenwick.operator import log_linear, unsupported
from .kernels.fenwick.plain import LogLinearInputs, level_of, within
from .outputs import LinearAttentionOutput
from .schemas import declared, taken_apart


class LocalRun(NamedTuple):
    """Consecutive local tokens of one document, from this position in it on."""

    start: int
    stop: int
    position: int


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    *,
    scale: float | None = None,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> LinearAttentionOutput:
    """Log-linear attention with a decay a head (Guo et al. 2025, arXiv 2506.04761; its Mamba-2 form).

        o_t = scale · Σ_{s ≤ t} λ_t[ℓ(t, s)] e^{Σ_{s < r ≤ t} g_r} (q_tᵀ k_s) v_s

    Level 0 is the token itself, and ℓ(t, s) the number of bits of t xor s, positions in the document. Work is
    O(T log T); on a split sequence ranks exchange log2 T states a segment.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        g: log-decay ``[B, T, H]``, ≤ 0. lam: weights of the levels ``[B, T, H, L]``; the longest document, of n tokens,
            has ``(n − 1).bit_length() + 1`` of them, and L is at least that.
        scale: multiplies ``qᵀk``; None: K**-0.5.
        layout: how the sequence is split over ranks, in runs of tokens; T is then this rank's length. Collective.
        cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device; read on the host.
        backend: "triton" (on CUDA; head sizes up to 128, q, k and v of one dtype), "torch" (PyTorch's operations, on
            every device) or None, the first that can.

    Returns:
        LinearAttentionOutput(o ``[B, T, H, V]`` in v's dtype, None): there are no states to go on from.

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if torch.compiler.is_compiling() and (layout is None or isinstance(layout, ShardedLayout)):
        others = LogLinearOthers(cu_seqlens, number_of(layout), scale, backend)
        return LinearAttentionOutput(_operator(q, k, v, g, lam, *others), None)
    x = LogLinearInputs(q, k, v, g, lam)
    own = ("scale", scale), ("backend", backend)
    facts = lambda: (*((n, Facts.of(t, 1)) for n, t in x._asdict().items()), *own)  # noqa: E731
    check = lambda: _check(x, scale, layout, cu_seqlens, backend)  # noqa: E731
    longest = check_together("log_linear_attention", layout, check, facts)
    with full_precision(v):
        return LinearAttentionOutput(_run(x, scale, longest, layout, cu_seqlens, backend), None)


class LogLinearOthers(NamedTuple):
    """What a call has beside its inputs; `layout`: its number, 0 for none."""

    cu_seqlens: Tensor | None
    layout: int
    scale: float | None
    backend: str | None


def _by_number(*arguments: Any) -> Tensor:
    """A call by its layout's number."""
    x, others = taken_apart(arguments, LogLinearInputs, LogLinearOthers)
    how = others._asdict() | {"layout": layout_of(others.layout)}
    return log_linear_attention(*x, **how).o


def _fake(*arguments: Any) -> Tensor:
    v = LogLinearInputs(*arguments[:5]).v
    return v.new_empty(v.shape)


_operator = SplitOperator(
    "log_linear_attention",
    _by_number,
    _fake,
    5,
    schema=f"({declared(LogLinearInputs, LogLinearOthers)}) -> Tensor",
)
"""What a compiled graph has of a call: how a document's positions fall into levels depends on its length."""


def _run(
    x: LogLinearInputs, scale: float | None, longest: int, layout: ShardedLayout | None, cu_seqlens: Tensor | None,
    backend: str | None,
) -> Tensor:  # fmt: skip
    """A checked call, in fp32 or wider."""
    H, factor = x.v.shape[2], float(x.q.shape[3] ** -0.5 if scale is None else scale)
    runs = _runs(layout, [0, x.v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist())
    dtype = torch.promote_types(x.v.dtype, torch.float32)
    kernels = _by_kernels(x, backend)
    wide = x
    if layout is not None or not kernels:
        q, k = (t.to(dtype).repeat_interleave(H // t.shape[2], 2) for t in x[:2])
        wide = LogLinearInputs(q * factor, k, *(t.to(dtype) for t in x[2:]))
    every = [run for segment in runs for run in segment]
    if kernels:
        o = log_linear(*x, [n for run in every for n in run], factor)
    else:
        o = torch.cat([wide.v[:, :0], *(within(_cut(wide, run), run.position) for run in every)], 1)
    if layout is not None:
        o = o + _of_others(wide, runs, layout, longest.bit_length())
    return o.to(x.v.dtype)


def _by_kernels(x: LogLinearInputs, backend: str | None) -> bool:
    """Whether a call goes by the kernels."""
    return backend != "torch" and not unsupported(*x)


def _check(
    x: LogLinearInputs, scale: object, layout: ShardedLayout | None, cu_seqlens: Tensor | None, backend: str | None
) -> int:
    """Refuse what does not fit; the length of the longest document."""
    for name, t in zip(LogLinearInputs._fields, x):
        dims = 3 if name == "g" else 4
        if not isinstance(t, Tensor) or t.dim() != dims or t.dtype not in FLOATS:
            raise ArgumentError(name, f"a float tensor of {dims} dimensions", describe_tensor(t))
    B, T, H = x.v.shape[:3]
    if x.q.shape != x.k.shape or x.k.shape[:2] != (B, T) or H % x.k.shape[2]:
        raise ArgumentError("k", f"[B, T, Hk, K] like q, beside v of shape {list(x.v.shape)}", list(x.k.shape))
    for name, t in (("g", x.g), ("lam", x.lam)):
        if t.shape[:3] != (B, T, H):
            raise ArgumentError(name, f"{[B, T, H]} first", list(t.shape))
    if fixed(layout):
        expected = "one without deterministic=True for log_linear_attention"
        raise UnsupportedError("layout", expected, "a deterministic one")
    check_scale(scale)
    if backend not in (None, "triton", "torch"):
        raise ArgumentError("backend", "None, 'triton' or 'torch'", repr(backend))
    if backend == "triton" and x.v.numel() and (why := unsupported(*x)):
        raise UnsupportedError("backend", "one that can run this", f"'triton': {why}", "Use backend='torch'")
    check_split(T, B, layout, cu_seqlens, x.v.device, "q")
    cu = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    if layout is not None:
        cu = list(layout.cu_seqlens)
    longest = max(b - a for a, b in zip(cu, cu[1:]))
    if longest and x.lam.shape[3] < (levels := (longest - 1).bit_length() + 1):
        raise ArgumentError("lam", f"{levels} levels or more for documents of {longest} tokens", x.lam.shape[3])
    return longest


def _runs(layout: ShardedLayout | None, cu: list[int]) -> list[list[LocalRun]]:
    """The runs of each local segment, of one device where there is no layout."""
    if layout is None:
        return [[LocalRun(a, b, 0) for a, b in zip(cu, cu[1:]) if b > a]]
    segments, at = [], 0
    for s in layout.local_segments():
        runs = []
        for p in layout.pieces_of(s):
            runs.append(LocalRun(at, at + len(p), p.start - layout.cu_seqlens[p.document]))
            at += len(p)
        segments.append(runs)
    return segments


def _of_others(x: LogLinearInputs, segments: list[list[LocalRun]], layout: ShardedLayout, levels: int) -> Tensor:
    """What tokens see of segments before theirs: each segment as a map of levels, their exchange, and what the
    levels that enter add to outputs."""
    maps = [_map(x, runs, levels) for runs in segments]
    B, H, K, V = x.v.shape[0], *x.k.shape[2:], x.v.shape[3]
    # empty parts that depend on the inputs: so the exchange is in the graph of ranks without tokens, too
    none = (
        x.v.new_zeros(B, 0, H, levels, levels) + x.g.sum(),
        x.v.new_zeros(B, 0, H, levels, K * V) + (x.k.sum() + x.v.sum()),
    )
    A, b = (torch.cat([empty, *(m[i][:, None] for m in maps)], 1) for i, empty in enumerate(none))
    borders = layout.kept(_of_segments, lambda: _of_segments(layout))
    entering = layout.cp.scan(A, b, borders, exclusive=True).unflatten(-1, (K, V))
    out = [x.v[:, :0] + entering.sum()]
    for i, runs in enumerate(segments):
        for n, run in enumerate(runs):
            later = n > 0 or not run.position
            part = _cut(x, run)
            out.append(torch.zeros_like(part.v) if later else _from_before(part, run.position, entering[:, i]))
    return torch.cat(out, 1)


def _cut(x: LogLinearInputs, run: LocalRun) -> LogLinearInputs:
    return LogLinearInputs(*(t[:, run.start : run.stop] for t in x))


def _first_of(position: int, level: int) -> int | None:
    """The first token of the level that this position finds; None where it has none."""
    return (position >> level) << level if position >> (level - 1) & 1 else None


# -- borders ---------------------------------------------------------------------------------------------------


def _of_segments(layout: ShardedLayout) -> ShardedLayout:
    """One place a segment, split as they are."""
    return layout.cp.layout(len(layout.segments), layout.kind, multiple_of=1)


def _map(x: LogLinearInputs, runs: list[LocalRun], levels: int) -> tuple[Tensor, Tensor]:
    """What a segment does to levels 1 … `levels`: ``A [B, H, L, L]``, ``b [B, H, L, K·V]``."""
    B, H, K, V = x.v.shape[0], *x.k.shape[2:], x.v.shape[3]
    if not runs:
        eye = torch.eye(levels, dtype=x.v.dtype, device=x.v.device)
        return eye.expand(B, H, -1, -1), x.v.new_zeros(B, H, levels, K * V)
    run = runs[-1]
    part, end = _cut(x, run), run.position + run.stop - run.start
    c = part.g.cumsum(1)
    k = part.k * (c[:, -1:] - c).exp()[..., None]
    written, moves = [], torch.zeros(levels, levels, dtype=x.v.dtype)
    for level in range(1, levels + 1):
        first = _first_of(end, level)
        begin, stop = (0, 0) if first is None else (first - run.position, first + (1 << (level - 1)) - run.position)
        rows = slice(max(begin, 0), max(stop, 0))
        written.append(torch.einsum("bthk,bthv->bhkv", k[:, rows], part.v[:, rows]).flatten(2))
        before = _first_of(run.position, level)
        if before is not None and len(runs) == 1:
            moves[int(level_of(end, before)) - 1, level - 1] = 1
    return c[:, -1].exp()[..., None, None] * moves.to(x.v.device), torch.stack(written, 2)


def _from_before(x: LogLinearInputs, position: int, entering: Tensor) -> Tensor:
    """What the levels ``[B, H, L, K, V]`` that enter a run add to its outputs."""
    at = position + torch.arange(x.v.shape[1], device=x.v.device)
    decay, out = x.g.cumsum(1).exp(), torch.zeros_like(x.v)
    for level in range(1, entering.shape[2] + 1):
        first = _first_of(position, level)
        if first is not None:
            now = level_of(at, first)[None, :, None, None].expand(*x.g.shape, 1)
            weight = x.lam.gather(-1, now) * decay[..., None]
            out = out + weight * torch.einsum("bthk,bhkv->bthv", x.q, entering[:, :, level - 1])
    return out
