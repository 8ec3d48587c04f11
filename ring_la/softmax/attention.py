"""`attention`: checks, agreement of the ranks, and the choice between one device and a split sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..autograd import refuse_transforms
from ..checks import check_nan, check_offsets
from ..choices import AttentionChoice, JointPlace
from ..context import ShardedLayout
from ..errors import ArgumentError, Facts, RingLAError, UnsupportedError
from ..outputs import AttentionOutput
from . import function, local, sharded
from .checks import Options, check_options, check_tensors
from .core import Tensors
from .merge import wide
from .scores import Scores


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
    if backend != "reference":
        refuse_transforms(zip(Tensors._fields, x))
    options = Options(causal, scale, softcap, window, alibi_slopes, dropout_p, dropout_seed, joint, strategy, backend)
    if isinstance(layout, ShardedLayout):
        run = _split_outside_graphs if torch.compiler.is_compiling() else _split
        return run(x, options, layout, kv_layout, cu_seqlens)
    _check(x, options, layout, kv_layout, cu_seqlens)
    if backend == "reference":
        return _reference(x, options, cu_seqlens)
    rest = (alibi_slopes, cu_seqlens, options.seed(), options.scale_of(q), float(softcap))
    if local.needs_operator(x):
        return AttentionOutput(*local.attention(*x, *rest, *options.bounds, float(dropout_p), joint, backend))
    plan = local.plan(x, *rest, options.bounds, float(dropout_p), joint, backend)
    return AttentionOutput(*function.attention(plan, x))


def _split(
    x: Tensors, options: Options, layout: ShardedLayout, kv_layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> AttentionOutput:
    """On a split sequence: check, agree, run. A call like one before on this layout runs at once."""
    known, call = layout.__dict__.setdefault("_attention_calls", {}), _kind_of_call(x, options, kv_layout, cu_seqlens)
    if call is not None and layout.cp.validate != "always" and call in known:
        return AttentionOutput(*function.attention(known[call], x))
    error = None
    try:
        _check(x, options, layout, kv_layout, cu_seqlens)
    except RingLAError as e:
        error = e
    layout.agree("attention", None if error else _signature(x, options, kv_layout), error)
    seed = options.seed()
    slopes = options.alibi_slopes
    scores = Scores(
        options.scale_of(x.q),
        float(options.softcap),
        *(None if w < 0 else w for w in options.bounds),
        None if slopes is None else slopes.to(wide(x.q.dtype)).reshape(-1, x.q.shape[2]),
        float(options.dropout_p),
        0 if seed is None else int(seed),
    )
    strategy = options.strategy or layout.cp.attention
    plan = sharded.ShardedCall(layout, kv_layout or layout, scores, options.joint, strategy, options.backend).plan(x)
    if call is not None:
        known[call] = plan
    return AttentionOutput(*function.attention(plan, x))


_split_outside_graphs = torch._disable_dynamo(_split)  # a compiled caller breaks its graph here, at the exchange


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype, as PyTorch's own attention takes them; fp64 stays."""

    def cast(t: object) -> object:
        floats = isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return t.to(torch.get_autocast_dtype(t.device.type)) if floats else t

    return [cast(t) for t in tensors]


def _reference(x: Tensors, options: Options, cu_seqlens: Tensor | None) -> AttentionOutput:
    """The dense fp64 truth, returned in the dtypes of the other backends."""
    names = ("causal", "scale", "softcap", "window", "alibi_slopes", "dropout_p", "joint")
    keywords = {n: getattr(options, n) for n in names}
    out = reference.attention(
        *x[:3], sinks=x.sinks, joint_k=x.joint_k, joint_v=x.joint_v, cu_seqlens=cu_seqlens, **keywords
    )
    return AttentionOutput(out.o.to(x.q.dtype), out.lse.to(wide(x.q.dtype)))


# -- checks ------------------------------------------------------------------------------------------------


def _check(x: Tensors, options: Options, layout: object, kv_layout: object, cu_seqlens: object) -> None:
    """Refuse what is wrong, by name."""
    check_tensors(x, options.joint, options.alibi_slopes)
    check_options(options)
    _check_split(x, layout, kv_layout, cu_seqlens, options.strategy)
    if layout is not None and options.backend == "reference":
        raise UnsupportedError("backend", "a kernel with a layout", "'reference'", "It runs on one device")
    if isinstance(layout, ShardedLayout) and layout.cp.validate == "always":
        for name, t in zip(Tensors._fields, x):
            if t is not None:
                check_nan(name, t)


def _check_split(x: Tensors, layout: object, kv_layout: object, cu_seqlens: object, strategy: str | None) -> None:
    """Refuse layouts and offsets that do not fit the tensors."""
    B, Tq, Tk = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    if layout is None:
        for name, given in (("kv_layout", kv_layout), ("strategy", strategy)):
            if given is not None:
                raise ArgumentError(name, "None without a layout", repr(given))
        if cu_seqlens is not None:
            if Tq != Tk:
                got = f"lengths {Tq} and {Tk}"
                raise ArgumentError("cu_seqlens", "None where q and k differ in length", got)
            check_offsets(cu_seqlens, B, Tk, x.q.device)
        return
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        if given is not None and not isinstance(given, ShardedLayout):
            raise ArgumentError(name, "a layout made by ContextParallel.layout, or None", type(given).__name__)
    if cu_seqlens is not None:
        raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
    layout.require_local("q", Tq)
    keys = layout if kv_layout is None else kv_layout
    if Tk == keys.seq_len:
        keys.require_local("k", Tk)
    if Tk != keys.local_length:
        hint = "" if kv_layout else "Give the keys' own layout as kv_layout"
        raise ArgumentError("kv_layout", f"one with {Tk} tokens on this rank, the T of k", keys.local_length, hint)
    if keys.cp is not layout.cp:
        raise ArgumentError("kv_layout", "a layout made by the ContextParallel of `layout`", repr(kv_layout))
    if keys.num_documents != layout.num_documents:
        raise ArgumentError("kv_layout", f"{layout.num_documents} documents, as in layout", keys.num_documents)
    if (layout.packed or keys.packed) and B != 1:
        raise ArgumentError("layout", f"no packed documents for a batch of {B}", repr(layout), "Pack into B = 1")


def _kind_of_call(x: Tensors, options: Options, kv_layout: object, cu_seqlens: object) -> tuple | None:
    """All that checks, agreement and plan depend on; None where that is more than shapes and flags."""
    if options.alibi_slopes is not None or options.dropout_p or cu_seqlens is not None:
        return None
    if not all([t is None or isinstance(t, Tensor) for t in x]):
        return None
    tensors = [None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in x]
    other = None if kv_layout is None else (kv_layout, getattr(kv_layout, "cp", None))
    call = (*tensors, other, torch.is_grad_enabled(), options)
    try:
        hash(call)
    except TypeError:  # a window given as a list
        return None
    return call


def _signature(x: Tensors, options: Options, kv_layout: ShardedLayout | None) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name: shapes but T, dtypes, flags and who needs a gradient."""

    def of(name: str, t: Tensor | None) -> tuple[str, object]:
        if t is None:
            return name, None
        return name, Facts.of(t, 1 if name in ("q", "k", "v") else None)

    tensors = [of(name, t) for name, t in (*zip(Tensors._fields, x), ("alibi_slopes", options.alibi_slopes))]
    flags = [(n, tuple(v) if isinstance(v, list) else v) for n, v in options._asdict().items() if n != "alibi_slopes"]
    other = None if kv_layout is None else kv_layout.key
    return (*tensors, *flags, ("kv_layout", other), ("gradients", torch.is_grad_enabled()))
