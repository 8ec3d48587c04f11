"""`attention`: checks, agreement of the ranks, and the choice between one device and a split sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..autograd import refuse_transforms, traced
from ..checks import check_nan
from ..choices import AttentionChoice, JointPlace
from ..context import ShardedLayout
from ..errors import Facts, RingLAError
from ..outputs import AttentionOutput
from . import operator, split_operator
from .call import AttentionCall, KnownCalls
from .merging import wide
from .options import AttentionOptions, check_options, check_split, check_whole
from .tensors import Tensors, check_tensors


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    joint_k: Tensor | None = None,
    joint_v: Tensor | None = None,
    joint: JointPlace = "none",
    layout: ShardedLayout | None = None,
    kv_layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: AttentionChoice | None = None,
    backend: str | None = None,
) -> AttentionOutput:
    """Softmax attention, whole or on a split sequence, with exact gradients.

        s_ij = cap(scale · q_iᵀ k_j) − slope · |p_j − p_i|,     o_i = Σ_j exp(s_ij − lse_i) v_j

    over the keys j of i's document that its mask lets it see; p counts from the start of the document. Queries fewer
    or more than the keys are aligned with them at the end of each document.

    Args:
        q: ``[B, Tq, H, K]``. k: ``[B, Tk, Hk, K]``. v: ``[B, Tk, Hk, V]``, H a multiple of Hk; query head h reads key
            head ``h // (H // Hk)``.
        causal: a query sees no key after its own position.
        scale: multiplies ``qᵀk``; None: K**-0.5.
        softcap: c > 0 caps scores at ±c; 0: none.
        window: keys a query sees to the left and to the right of its position; −1: all.
        alibi_slopes: ``[H]`` or ``[B, H]``, without a gradient.
        sinks: ``[H]``, one more logit in each head's denominator, with no value (gpt-oss). Its gradient under a layout
            is this rank's part.
        dropout_p: probability of dropping a weight. The mask is a hash of the seed and global positions: the same
            however the sequence is split, forward and backward.
        dropout_seed: an int below 2**63; None: drawn from PyTorch's CPU generator, which ranks must have seeded alike
            for the mask not to depend on the split.
        joint_k, joint_v: ``[B, Tj, Hk, ·]``, keys beside those of each document (text of a diffusion model), the same
            on all ranks; masks take them where they stand. Their gradients under a layout are this rank's part.
        joint: "front": joint keys stand before each document's first key; "rear": after its last one; "none".
        layout: how the queries' sequence is split over ranks; T is then this rank's length. Collective: every rank
            calls, forward and backward.
        kv_layout: how the keys' sequence is split, where it is another one (cross-attention).
        cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device.
        strategy: how keys and values travel; None: what the ContextParallel says.
        backend: the kernel; None: the fastest that can do this. "reference": dense fp64, on one device.

    Returns:
        AttentionOutput(o ``[B, Tq, H, V]`` in q's dtype, lse fp32 (fp64 for fp64) ``[B, H, Tq]``). A query that sees
        no key has o = 0 and lse = −∞. Both are differentiable, once.

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
        DisagreementError: the ranks' arguments do not fit together.
    """
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v, joint_k, joint_v = _autocast(q, k, v, joint_k, joint_v)
    x = Tensors(q, k, v, sinks, joint_k, joint_v)
    of_scores = (causal, scale, softcap, window, alibi_slopes, dropout_p, dropout_seed)
    options = AttentionOptions(*of_scores, joint, kv_layout, cu_seqlens, strategy, backend)
    if backend != "reference":
        refuse_transforms(x.named())
    if isinstance(layout, ShardedLayout):
        return _traced(x, options, layout) if torch.compiler.is_compiling() else _split(x, options, layout)
    _check(x, options, layout)
    if backend == "reference":
        return _reference(x, options)
    call = AttentionCall(options.scores(q), joint, backend, cu_seqlens)
    # The operator's layers take a host 0.12 of the 0.92 ms of a forward and backward (H200): for who must see one node.
    if any(traced(t) for t in x if t is not None):
        return AttentionOutput(*operator.attention(*operator.flat(x, call)))
    return AttentionOutput(*call.plan(x)(x))


def _split(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> AttentionOutput:
    """On a split sequence: check, agree, run. A call like one before on this layout runs at once."""
    known, kind = KnownCalls.of(layout).plans, _kind_of_call(x, options)
    if kind is not None and layout.cp.validate != "always" and kind in known:
        return AttentionOutput(*known[kind](x))
    error = None
    try:
        _check(x, options, layout)
    except RingLAError as e:
        error = e
    layout.agree("attention", None if error else _signature(x, options), error)
    split = (layout, options.kv_layout or layout, options.strategy or layout.cp.attention)
    plan = AttentionCall(options.scores(x.q), options.joint, options.backend, None, *split).plan(x)
    if kind is not None:
        known[kind] = plan
    return AttentionOutput(*plan(x))


def _traced(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> AttentionOutput:
    """A split call within a compiled graph: one node, which checks when it runs."""
    check_options(options)
    scores = options.scores(x.q)
    return AttentionOutput(*split_operator.split_attention(*split_operator.flat(x, scores, options, layout)))


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype, as PyTorch's own attention takes them; fp64 stays."""

    def cast(t: object) -> object:
        floats = isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return t.to(torch.get_autocast_dtype(t.device.type)) if floats else t

    return [cast(t) for t in tensors]


def _reference(x: Tensors, options: AttentionOptions) -> AttentionOutput:
    """The dense fp64 truth, returned in the dtypes of the other backends."""
    not_its = ("dropout_seed", "kv_layout", "strategy", "backend")
    keywords = {name: value for name, value in options._asdict().items() if name not in not_its}
    out = reference.attention(*x[:3], sinks=x.sinks, joint_k=x.joint_k, joint_v=x.joint_v, **keywords)
    return AttentionOutput(out.o.to(x.q.dtype), out.lse.to(wide(x.q.dtype)))


# -- checks and agreement ----------------------------------------------------------------------------------


def _check(x: Tensors, options: AttentionOptions, layout: object) -> None:
    """Refuse what is wrong, by name."""
    check_tensors(x, options.joint, options.alibi_slopes)
    check_options(options)
    if layout is None:
        check_whole(x.q, x.k, options)
        return
    check_split(x.q, x.k, options, layout)
    if layout.cp.validate == "always":
        for name, t in x.named():
            if t is not None:
                check_nan(name, t)


def _kind_of_call(x: Tensors, options: AttentionOptions) -> tuple | None:
    """All that checks, agreement and plan depend on; None where that is more than shapes and flags."""
    if options.alibi_slopes is not None or options.dropout_p or options.cu_seqlens is not None:
        return None
    if not all([t is None or isinstance(t, Tensor) for t in x]):
        return None
    tensors = [None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in x]
    kind = (*tensors, getattr(options.kv_layout, "cp", None), torch.is_grad_enabled(), options)
    try:
        hash(kind)
    except TypeError:  # a window given as a list
        return None
    return kind


def _signature(x: Tensors, options: AttentionOptions) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name: shapes but T, dtypes, flags and who needs a gradient."""

    def of(name: str, t: Tensor | None) -> tuple[str, object]:
        if t is None:
            return name, None
        return name, Facts.of(t, 1 if name in ("q", "k", "v") else None)

    def flag(name: str, value: object) -> tuple[str, object]:
        if isinstance(value, Tensor):
            return of(name, value)
        if isinstance(value, ShardedLayout):
            return name, value.key
        return name, tuple(value) if isinstance(value, list) else value

    tensors, flags = [of(*named) for named in x.named()], [flag(*option) for option in options._asdict().items()]
    return (*tensors, *flags, ("gradients", torch.is_grad_enabled()))
