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

from .autograd import full_precision, outside_graphs
from .blockwise import fixed
from .checks import check_flag, check_scale, check_split, is_floats, is_int
from .comm.replicated import Replicated
from .context import ShardedLayout, check_together
from .context.handle import layout_of, number_of
from .context.operator import SplitOperator
from .errors import ArgumentError, Facts, UnsupportedError, describe_tensor
from .kernels.fenwick.operator import log_linear, unsupported
from .kernels.fenwick.plain import LogLinearInputs, within
from .levels import LevelStates, cut, of_others, one_device, runs_of
from .linear.states import with_rows, without_rows
from .outputs import LinearAttentionOutput
from .schemas import declared, taken_apart


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    first: int | tuple[int, ...] = 0,
    output_final_state: bool = False,
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
        initial_state: the levels before each document, ``[N, H, L, K, V]``; N is B, or the number of packed documents.
            Replicated under a layout; its gradient is the whole one on every rank.
        first: tokens that each document's initial state has seen, one int for all or a tuple of N; positions go on
            from there, and documents are so much longer.
        output_final_state: also return the levels after each document, on every rank; gradients flowing into them are
            summed over the ranks.
        layout: how the sequence is split over ranks, in runs of tokens; T is then this rank's length. Collective.
        cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device; read on the host.
        backend: "triton" (on CUDA; head sizes up to 128, q, k and v of one dtype), "torch" (PyTorch's operations, on
            every device) or None, the first that can.

    Returns:
        LinearAttentionOutput(o ``[B, T, H, V]`` in v's dtype, the levels or None): fp32, or fp64 of fp64 values.

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    states = initial_state, first, output_final_state
    if torch.compiler.is_compiling() and (layout is None or isinstance(layout, ShardedLayout)):
        if initial_state is None and not output_final_state:
            others = LogLinearOthers(cu_seqlens, number_of(layout), scale, backend)
            return LinearAttentionOutput(_operator(q, k, v, g, lam, *others), None)
        return _apart(LogLinearInputs(q, k, v, g, lam), scale, states, layout, cu_seqlens, backend)
    return _called(LogLinearInputs(q, k, v, g, lam), scale, states, layout, cu_seqlens, backend)


Given = tuple[Tensor | None, int | tuple[int, ...], bool]
"""What a call says of states: the initial one, the tokens it has seen, whether the final one is wanted."""


def _called(
    x: LogLinearInputs, scale: float | None, given: Given, layout: ShardedLayout | None, cu_seqlens: Tensor | None,
    backend: str | None,
) -> LinearAttentionOutput:  # fmt: skip
    """A call, checked."""
    state, first, final = given
    own = ("scale", scale), ("backend", backend), ("first", first), ("output_final_state", final)
    before = ("initial_state", None if state is None else Facts.of(state) if isinstance(state, Tensor) else state)
    facts = lambda: (*((n, Facts.of(t, 1)) for n, t in x._asdict().items()), before, *own)  # noqa: E731

    def check() -> tuple[int, ...]:
        _check(x, scale, layout, cu_seqlens, backend)
        return _seen(x, given, layout, cu_seqlens)

    seen = check_together("log_linear_attention", layout, check, facts)
    with full_precision(x.v):
        return _run(x, scale, seen, given, layout, cu_seqlens, backend)


_apart = outside_graphs(_called)


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
    x: LogLinearInputs, scale: float | None, seen: tuple[int, ...], given: Given, layout: ShardedLayout | None,
    cu_seqlens: Tensor | None, backend: str | None,
) -> LinearAttentionOutput:  # fmt: skip
    """A checked call, in fp32 or wider."""
    H, factor = x.v.shape[2], float(x.q.shape[3] ** -0.5 if scale is None else scale)
    cu = [0, x.v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    segments = runs_of(layout, cu, seen)
    dtype, (state, _, final) = torch.promote_types(x.v.dtype, torch.float32), given
    packed = cu_seqlens is not None or (layout is not None and layout.packed)
    kernels = _by_kernels(x, backend)
    wide, plain = x, state is None and not final
    if layout is not None or not kernels or not plain:
        q, k = (t.to(dtype).repeat_interleave(H // t.shape[2], 2) for t in x[:2])
        wide = LogLinearInputs(q * factor, k, *(t.to(dtype) for t in x[2:]))
    every = [run for segment in segments for run in segment]
    if kernels:
        o = log_linear(*x, [n for run in every for n in run[:3]], factor)
    else:
        o = torch.cat([wide.v[:, :0], *(within(cut(wide, run), run.position) for run in every)], 1)
    if state is not None:
        state = state.to(dtype) if layout is None else Replicated.apply(state.to(dtype), layout.cp.comm)
        state = with_rows(state, packed)
    more, ends = None, None
    if layout is not None:
        longest = max(b - a + n for a, b, n in zip(layout.cu_seqlens, layout.cu_seqlens[1:], seen))
        levels = longest.bit_length() if plain else x.lam.shape[3]
        more, ends = of_others(wide, segments, layout, LevelStates(state, levels, final))
    elif not plain:
        states = LevelStates(state, x.lam.shape[3], final)
        more, ends = one_device(wide, every, states, len(seen) if packed else 1)
    o = o if more is None else o + more
    return LinearAttentionOutput(o.to(x.v.dtype), None if ends is None else without_rows(ends, packed))


def _by_kernels(x: LogLinearInputs, backend: str | None) -> bool:
    """Whether a call goes by the kernels."""
    return backend != "torch" and not unsupported(*x)


def _check(
    x: LogLinearInputs, scale: object, layout: ShardedLayout | None, cu_seqlens: Tensor | None, backend: str | None
) -> None:
    """Refuse what does not fit."""
    for name, t in zip(LogLinearInputs._fields, x):
        dims = 3 if name == "g" else 4
        if not is_floats(t, dims):
            raise ArgumentError(name, f"a float tensor of {dims} dimensions", describe_tensor(t))
        if t.device != x.q.device:
            raise ArgumentError(name, f"a tensor on {x.q.device}, where q is", t.device)
    B, T, H = x.v.shape[:3]
    if x.q.shape != x.k.shape or x.k.shape[:2] != (B, T) or not x.k.shape[2] or H < 1 or H % x.k.shape[2]:
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


def _seen(
    x: LogLinearInputs, given: Given, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> tuple[int, ...]:  # fmt: skip
    """The tokens before each document, of a call whose states fit."""
    state, first, final = given
    cu = [0, x.v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    packed, cu = cu_seqlens is not None, cu if layout is None else list(layout.cu_seqlens)
    packed = packed or (layout is not None and layout.packed)
    documents = len(cu) - 1
    check_flag("output_final_state", final)
    seen = first if isinstance(first, tuple) else (first,) * documents
    if not all(is_int(n, 0) for n in seen):
        raise ArgumentError("first", "an int ≥ 0, or a tuple of them", repr(first))
    if len(set(seen)) == 1 and not packed:
        seen = seen[:1]
    if len(seen) != documents:
        raise ArgumentError("first", f"an int, or a tuple of {documents}", repr(first), "Rows go on together")
    if state is None and any(seen):
        raise ArgumentError("first", "0 without an initial_state", repr(first))
    L = x.lam.shape[3]
    if state is not None:
        shape = [documents if packed else x.v.shape[0], x.v.shape[2], L, x.k.shape[3], x.v.shape[3]]
        if not is_floats(state) or list(state.shape) != shape:
            raise ArgumentError("initial_state", f"a float tensor [N, H, L, K, V] = {shape}", describe_tensor(state))
        if state.device != x.q.device:
            raise ArgumentError("initial_state", f"a tensor on {x.q.device}, where q is", state.device)
    longest = max(b - a + n for a, b, n in zip(cu, cu[1:], seen))
    if longest and L < (levels := (longest - 1).bit_length() + 1):
        raise ArgumentError("lam", f"{levels} levels or more for documents of {longest} tokens", L)
    return seen
