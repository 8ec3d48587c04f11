"""Our own kernels as a backend of the common protocol: those of spans where these are all there is to the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import Pair
from ...merging import Gradients, Partial, has_triton
from ...merging.parts import dense
from ...scores import Scores
from ..backend import Ask, AttentionBackend, QueryRows
from . import launch, plan
from .launch import General, OfSums, apart, of_tokens, put_sums
from .span_launch import OfSpans

WIDEST = 256


class TritonBackend(AttentionBackend):
    """Tiles that meet, in one call a block however many documents and runs there are."""

    name = "triton"
    sums_wide = False
    knows = frozenset({"scale", "softcap", "alibi_slopes", "dropout_p", "sums"})

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type != "cuda" and not launch.interpreted:
            return "tensors are not on a CUDA device"
        if not has_triton():
            return "triton is not installed"
        if ask.dtype == torch.float64:
            return "it has no fp64"
        if max(ask.width, ask.value_width) > WIDEST:
            return f"it needs K and V up to {WIDEST}, not {ask.width} and {ask.value_width}"
        return super().unsupported(ask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        met = plan.trimmed(pair)
        if met is None:
            return
        q, k, v = (dense(x) for x in (q[:, met.rows], k[:, met.keys], v[:, met.keys]))
        of_sums, q, k = apart(q, k, scores)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        _kernels(scores, met.pair, q, k, v, o, of_sums).forward(o, lse)
        out.add(o, lse, met.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        met = plan.trimmed(pair)
        if met is None:
            return
        q, do, k, v = (dense(t) for t in (x.q[:, met.rows], x.do[:, met.rows], k[:, met.keys], v[:, met.keys]))
        lse, delta = (t[:, :, met.rows].contiguous() for t in (x.lse, x.delta))
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        of_sums, q, k = apart(q, k, scores)
        sums = None if of_sums is None else (of_tokens(q), of_tokens(k))
        _kernels(scores, met.pair, q, k, v, do, of_sums).backward(lse, delta, (dq, dk, dv), sums)
        if sums is not None:
            put_sums((dq, dk), sums, scores)
        out.add(dq, dk, dv, met.rows, met.keys)


def _kernels(
    scores: Scores, pair: Pair, q: Tensor, k: Tensor, v: Tensor, o: Tensor, of_sums: OfSums
) -> General | OfSpans:
    block = OfSpans(scores, pair, q, k, v, o, of_sums)
    return block if block.possible else General(scores, pair, q, k, v, o, of_sums)
