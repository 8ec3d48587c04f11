"""`attention`: checks, agreement of the ranks, and the choice between one device and a split sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..autograd import refuse_tangents
from ..context import ATTENTION, ShardedLayout
from ..errors import ArgumentError, RingLAError, UnsupportedError
from ..layout import check_cu_seqlens
from ..outputs import AttentionOutput
from . import function, local, sharded
from .backends import BACKENDS
from .core import Tensors
from .merge import wide
from .scores import Scores

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    joint: str = "none",
    layout: ShardedLayout | None = None,
    kv_layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: str | None = None,
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
        joint_k, joint_v: ``[B, Tj, Hk, ·]``, keys that every query sees besides (text of a diffusion model), the same
            on all ranks; their gradients under a layout are this rank's part.
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
        refuse_tangents(zip(Tensors._fields, x))
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


class Options(NamedTuple):
    """The keywords of a call that are no differentiable tensors, as the caller gave them."""

    causal: bool
    scale: float | None
    softcap: float
    window: tuple[int, int]
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    joint: str
    strategy: str | None
    backend: str | None

    @property
    def bounds(self) -> tuple[int, int]:
        """How far a query sees to the left and right; −1: all the way."""
        return int(self.window[0]), 0 if self.causal else int(self.window[1])

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def seed(self) -> Tensor | None:
        """The seed of this call's dropout mask, on the CPU; None without dropout."""
        if not self.dropout_p:
            return None
        return torch.randint(2**62, ()) if self.dropout_seed is None else torch.tensor(self.dropout_seed)


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
    _check_tensors(x, options.joint, options.alibi_slopes)
    _check_options(options)
    _check_split(x, layout, kv_layout, cu_seqlens, options.strategy)
    if layout is not None and options.backend == "reference":
        raise UnsupportedError("backend", "a kernel with a layout", "'reference'", "It runs on one device")
    if isinstance(layout, ShardedLayout) and layout.cp.validate == "always":
        for name, t in zip(Tensors._fields, x):
            if t is not None and bool(torch.isnan(t).any()):
                raise ArgumentError(name, "no NaN", f"{int(torch.isnan(t).sum())} of them")


def _check_tensors(x: Tensors, joint: str, alibi_slopes: Tensor | None) -> None:
    """Refuse what is not a float tensor of the right shape, dtype and device."""
    for name, t in zip(Tensors._fields, x):
        if t is None and name not in ("q", "k", "v"):
            continue
        if not isinstance(t, Tensor) or t.dtype not in FLOATS:
            raise ArgumentError(name, "a tensor of fp16, bf16, fp32 or fp64", _describe(t))
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
        if t.dim() != 4:
            raise ArgumentError(name, "four dimensions [B, T, H, D]", list(t.shape))
        if t.dtype != x.q.dtype:
            raise ArgumentError(name, f"{x.q.dtype}, the dtype of q", t.dtype)
    B, _, H, K = x.q.shape
    Tk, Hk = x.k.shape[1:3]
    if list(x.k.shape) != [B, Tk, Hk, K]:
        raise ArgumentError("k", f"[B, Tk, Hk, K] with B={B}, K={K}", list(x.k.shape))
    if list(x.v.shape[:3]) != [B, Tk, Hk]:
        raise ArgumentError("v", f"[B, Tk, Hk, V] with B={B}, Tk={Tk}, Hk={Hk}", list(x.v.shape))
    if K == 0:
        raise ArgumentError("q", "K ≥ 1 channels a head", list(x.q.shape))
    if Hk == 0 or H % Hk:
        raise ArgumentError("q", f"a number of heads that is a multiple of the {Hk} of k", H)
    if x.sinks is not None and list(x.sinks.shape) != [H]:
        raise ArgumentError("sinks", f"[H] = [{H}]", list(x.sinks.shape))
    _check_joint(x, joint)
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor) or list(alibi_slopes.shape) not in ([H], [B, H]):
            raise ArgumentError("alibi_slopes", f"[H] = [{H}] or [B, H] = [{B}, {H}]", _describe(alibi_slopes))
        if alibi_slopes.requires_grad:
            raise UnsupportedError("alibi_slopes", "constants", "a tensor that requires a gradient", "Detach it")
    for name, t in (*zip(Tensors._fields, x), ("alibi_slopes", alibi_slopes)):
        if t is not None and t.device != x.q.device:
            raise ArgumentError(name, f"a tensor on {x.q.device}, where q is", t.device)


def _check_joint(x: Tensors, joint: str) -> None:
    given = x.joint_k is not None, x.joint_v is not None
    if joint not in ("none", "front", "rear"):
        raise ArgumentError("joint", "'front', 'rear' or 'none'", repr(joint))
    if given != ((joint != "none"),) * 2:
        expected = "'front' or 'rear' with joint_k and joint_v, 'none' without"
        raise ArgumentError("joint", expected, f"{joint!r}, joint_k given: {given[0]}, joint_v given: {given[1]}")
    if joint == "none":
        return
    (B, _, Hk, K), V = x.k.shape, x.v.shape[3]
    Tj = x.joint_k.shape[1] if x.joint_k.dim() > 1 else 0
    for name, t, D in (("joint_k", x.joint_k, K), ("joint_v", x.joint_v, V)):
        if list(t.shape) != [B, Tj, Hk, D]:
            raise ArgumentError(name, f"[B, Tj, Hk, D] with B={B}, Tj={Tj}, Hk={Hk}, D={D}", list(t.shape))
        if t.dtype != x.q.dtype:
            raise ArgumentError(name, f"{x.q.dtype}, the dtype of q", t.dtype)


def _check_options(o: Options) -> None:
    if not isinstance(o.causal, bool):
        raise ArgumentError("causal", "True or False", repr(o.causal))
    if o.scale is not None and not _finite(o.scale):
        raise ArgumentError("scale", "a finite number or None", repr(o.scale))
    if not _finite(o.softcap) or o.softcap < 0:
        raise ArgumentError("softcap", "a finite number ≥ 0", repr(o.softcap))
    pair = isinstance(o.window, (tuple, list)) and len(o.window) == 2 and all(isinstance(w, int) for w in o.window)
    if not pair or min(o.window) < -1:
        raise ArgumentError("window", "(left, right), two ints, each −1 or more", repr(o.window))
    if not _finite(o.dropout_p) or not 0 <= o.dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", repr(o.dropout_p))
    if o.dropout_seed is not None and (not isinstance(o.dropout_seed, int) or not 0 <= o.dropout_seed < 2**63):
        raise ArgumentError("dropout_seed", "None or an int from 0 to 2**63 − 1", repr(o.dropout_seed))
    if o.joint == "rear" and o.causal:
        raise UnsupportedError("joint", "'front' where causal", "'rear'", "No query sees keys after its own position")
    if o.strategy is not None and o.strategy not in ATTENTION:
        raise ArgumentError("strategy", f"None or one of {', '.join(ATTENTION)}", repr(o.strategy))
    if o.backend not in (None, "reference", *BACKENDS):
        raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}, reference", repr(o.backend))


def _finite(x: object) -> bool:
    return isinstance(x, (int, float)) and -math.inf < x < math.inf


def _check_split(x: Tensors, layout: object, kv_layout: object, cu_seqlens: object, strategy: str | None) -> None:
    """Refuse layouts and offsets that do not fit the tensors."""
    B, Tq, Tk = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    if layout is None:
        for name, given in (("kv_layout", kv_layout), ("strategy", strategy)):
            if given is not None:
                raise ArgumentError(name, "None without a layout", repr(given))
        if cu_seqlens is not None:
            _check_offsets(cu_seqlens, B, Tq, Tk, x.q.device)
        return
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        if given is not None and not isinstance(given, ShardedLayout):
            raise ArgumentError(name, "a layout made by ContextParallel.layout, or None", type(given).__name__)
    if cu_seqlens is not None:
        raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
    if Tq != layout.local_length:
        raise ArgumentError("layout", f"one with {Tq} tokens on this rank, the T of q", layout.local_length)
    keys = layout if kv_layout is None else kv_layout
    if Tk != keys.local_length:
        hint = "" if kv_layout else "Give the keys' own layout as kv_layout"
        raise ArgumentError("kv_layout", f"one with {Tk} tokens on this rank, the T of k", keys.local_length, hint)
    if keys.cp is not layout.cp:
        raise ArgumentError("kv_layout", "a layout made by the ContextParallel of `layout`", repr(kv_layout))
    if keys.num_documents != layout.num_documents:
        raise ArgumentError("kv_layout", f"{layout.num_documents} documents, as in layout", keys.num_documents)
    if (layout.packed or keys.packed) and B != 1:
        raise ArgumentError("layout", f"no packed documents for a batch of {B}", repr(layout), "Pack into B = 1")


def _check_offsets(cu: object, B: int, Tq: int, Tk: int, device: torch.device) -> None:
    if not isinstance(cu, Tensor) or cu.dim() != 1 or cu.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("cu_seqlens", "an int32 or int64 tensor [N+1]", _describe(cu))
    if B != 1:
        raise ArgumentError("cu_seqlens", "None for a batch of several rows", f"B = {B}", "Pack into B = 1")
    if Tq != Tk:
        raise ArgumentError("cu_seqlens", "None where q and k differ in length", f"lengths {Tq} and {Tk}")
    if cu.device != device:
        raise ArgumentError("cu_seqlens", f"a tensor on {device}", cu.device)
    if cu.device.type == "cpu" and not torch.compiler.is_compiling():
        check_cu_seqlens(cu, Tk)


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


def _signature(x: Tensors, options: Options, kv_layout: ShardedLayout | None) -> tuple:
    """What must be the same on all ranks: shapes but T, dtypes, flags and who needs a gradient."""

    def of(name: str, t: Tensor | None) -> object:
        if t is None:
            return None
        shape = (t.shape[0], *t.shape[2:]) if name in ("q", "k", "v") else tuple(t.shape)
        return (name, shape, str(t.dtype), t.requires_grad)

    tensors = [of(name, t) for name, t in (*zip(Tensors._fields, x), ("alibi_slopes", options.alibi_slopes))]
    flags = [v for n, v in zip(options._fields, options) if n != "alibi_slopes"]
    other = None if kv_layout is None else kv_layout.key
    return (*tensors, *(tuple(v) if isinstance(v, list) else v for v in flags), other, torch.is_grad_enabled())


def _describe(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
