"""flash-linear-attention's context-parallel operators over ring_la, with its signatures.

    from ring_la.integrations.fla import chunk_gated_delta_rule, chunk_kda, causal_conv1d_cp

For engines that split a sequence by fla-core's ``build_cp_context(cu_seqlens, group)`` and hand its context on: the
same call, contiguous or zigzag, on GPUs and CPUs. fla-core is not imported. A context says where this rank's documents
begin; of the others' the ranks tell each other once a context, after which it carries ring_la's layout. Without a
context the operators work on one device, where states go in and out.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..context import ContextParallel, ShardedLayout
from ..conv import short_conv
from ..errors import ArgumentError, UnsupportedError
from ..outputs import LinearAttentionOutput
from ..recurrences import gated_delta_rule, kda

HARMLESS = {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "max_num_seqs", "safe_gate"}
"""Keywords that do not change the result: of how upstream computes."""

_contexts: WeakKeyDictionary[dist.ProcessGroup, ContextParallel] = WeakKeyDictionary()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule.

    ``q, k [B, T, H, K]``, ``v [B, T, HV, V]``, ``g, beta [B, T, HV]``; states ``[N, HV, K, V]``.

    Other keywords: use_gate_in_kernel, A_log, dt_bias.

    Raises:
        ArgumentError, UnsupportedError: by name; as upstream, states with a context.
    """
    gate = _gate(g, kwargs)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    _refuse(kwargs, {"use_gate_in_kernel", "A_log", "dt_bias"})
    where = _where(cp_context, cu_seqlens, initial_state, output_final_state, state_v_first)
    out = gated_delta_rule(
        *_grouped(q, k, v), v, gate, beta, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel, **where
    )
    return _results(out, state_v_first)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: as `chunk_gated_delta_rule`, with ``g [B, T, HV, K]``.

    Other keywords: A_log ``[HV]``, dt_bias ``[HV · K]``. `lower_bound` changes the gate that is made here; of one that
    is given it is a promise.

    Raises:
        ArgumentError, UnsupportedError: by name; as upstream, states with a context.
    """
    _expect_false(return_intermediate_states=return_intermediate_states, use_graph=use_graph)
    gate = _gate(g, kwargs | {"use_gate_in_kernel": use_gate_in_kernel}, lower_bound)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    _refuse(kwargs, {"A_log", "dt_bias"})
    where = _where(cp_context, cu_seqlens, initial_state, output_final_state, state_v_first)
    how = dict(scale=scale, lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm_in_kernel) | where
    return _results(kda(*_grouped(q, k, v), v, gate, beta, **how), state_v_first)


def causal_conv1d_cp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int | None = None,
    backend: str = "triton",
    residual: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel, ``x [1, T, D]``, ``weight [D, W]``, over the ranks of a context.

    Raises:
        ArgumentError: by name.
    """
    if activation not in (None, "silu", "swish"):
        raise ArgumentError("activation", "None, 'silu' or 'swish'", repr(activation))
    if cp_context is None:
        raise ArgumentError("cp_context", "one of fla-core's build_cp_context", "None")
    y = short_conv(x, weight, bias, "silu" if activation else None, layout=layout_of(cp_context)).o
    return y if residual is None else y + residual


def layout_of(cp_context: Any) -> ShardedLayout:
    """The layout that a context of fla-core stands for. Collective the first time.

    Raises:
        ArgumentError: it is no such context, or of a group of which this rank is none.
    """
    known = vars(cp_context).get("_ring_la_layout")
    if known is not None:
        return known
    group, kind = cp_context.group, cp_context.layout
    if kind not in ("contiguous", "zigzag") or not isinstance(group, dist.ProcessGroup):
        got = f"layout {kind!r} and group {type(group).__name__}"
        raise ArgumentError("cp_context", "one of fla-core's build_cp_context, with a group", got)
    if group not in _contexts:
        _contexts[group] = ContextParallel(group)
    cp = _contexts[group]
    offsets = cp_context.cu_seqlens if cp_context.cu_seqlens_cpu is None else cp_context.cu_seqlens_cpu
    told = cp.comm.agreement.tell(json.dumps(_begins(cp_context, offsets.tolist(), cp.rank, cp.size)))
    seq_len = cp.size * int(offsets[-1])
    begins = sorted({place for said in map(json.loads, told) for place in said})
    layout = cp.layout(seq_len, kind, None if begins == [0] else [*begins, seq_len])
    cp_context._ring_la_layout = layout
    return layout


def _begins(context: Any, offsets: list[int], rank: int, size: int) -> list[int]:
    """Where documents begin in the whole sequence, of those that begin on this rank."""
    if context.layout == "contiguous":
        parts = [(rank, 0, offsets[-1], context.pre_num_conv_tokens)]
    else:
        half = context.part_len
        before = context.pre_num_conv_tokens_by_part
        parts = [(rank, 0, half, before[0]), (2 * size - 1 - rank, half, 2 * half, before[1])]
    found = []
    for part, first, end, earlier in parts:
        here = [offset for offset in offsets if first < offset < end] + ([] if earlier else [first])
        found += [part * (end - first) + offset - first for offset in here]
    return found


def _where(
    context: Any, cu_seqlens: Tensor | None, state: Tensor | None, output_state: bool, v_first: bool
) -> dict[str, Any]:
    """Where the tokens stand, and the states that go in and out, for one of ring_la's functions."""
    if context is None:
        state = state.mT if state is not None and v_first else state
        return {"cu_seqlens": cu_seqlens, "initial_state": state, "output_final_state": output_state}
    for name, given in (("initial_state", state is not None), ("output_final_state", output_state)):
        if given:
            raise UnsupportedError(name, "none with a cp_context, as upstream", "one")
    return {"layout": layout_of(context)}


def _results(out: LinearAttentionOutput, v_first: bool) -> tuple[Tensor, Tensor | None]:
    state = out.final_state
    return out.o, state.mT if state is not None and v_first else state


def _expect_false(**flags: bool) -> None:
    for name, value in flags.items():
        if value:
            raise UnsupportedError(name, "False", value)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys for as many heads as there are of values."""
    if v.shape[2] % q.shape[2]:
        raise ArgumentError("v", f"a multiple of q's {q.shape[2]} heads", v.shape[2])
    each = v.shape[2] // q.shape[2]
    return (q, k) if each == 1 else (q.repeat_interleave(each, 2), k.repeat_interleave(each, 2))


def _strength(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """β, fp32 where it is made here."""
    if negative and not sigmoid:
        raise ArgumentError("allow_neg_eigval", "False without use_beta_sigmoid_in_kernel", negative)
    beta = beta.float().sigmoid() if sigmoid else beta
    return 2 * beta if negative else beta


def _gate(g: Tensor, keywords: dict[str, Any], lower_bound: float | None = None) -> Tensor:
    """Decays in log space, fp32 where they are made here."""
    if not keywords.get("use_gate_in_kernel"):
        return g
    A_log, bias = keywords.get("A_log"), keywords.get("dt_bias")
    g = g.float() if bias is None else g.float() + bias.float().view(g.shape[2:])
    rate = None if A_log is None else A_log.float().exp().view(-1, *(1 for _ in g.shape[3:]))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if rate is None else rate * g)
    if rate is None:
        raise ArgumentError("A_log", "one with use_gate_in_kernel", "None")
    return -rate * F.softplus(g)


def _refuse(keywords: dict[str, Any], known: set[str]) -> None:
    unknown = keywords.keys() - known - HARMLESS
    if unknown:
        raise UnsupportedError("kwargs", f"{', '.join(sorted(known | HARMLESS))}", ", ".join(sorted(unknown)))
