"""`attention`, `mla` and `sparse_attention`: their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ..choices import AttentionChoice, ChosenBackendName, ChosenChoice, JointPlace, LatentForm, SoftmaxBackend
from ..context import ShardedLayout
from ..errors import ArgumentError
from ..outputs import AttentionOutput, MLAOutput
from .door import attend, autocast, refuse, under_autocast
from .options import AttentionOptions
from .tensors import Tensors


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
    backend: SoftmaxBackend | None = None,
    kv_comm_dtype: torch.dtype | None = None,
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
        kv_comm_dtype: torch.float8_e4m3fn or float8_e5m2: keys and values are rounded to it, with a scale for each
            token and head, and travel so, about half of bf16's bytes. Without gradients; None: in their own dtype.

    Returns:
        AttentionOutput(o ``[B, Tq, H, V]`` in q's dtype, lse fp32 (fp64 for fp64) ``[B, H, Tq]``). A query that sees
        no key has o = 0 and lse = −∞. Both are differentiable, once.

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
        DisagreementError: the ranks' arguments do not fit together.
    """
    if under_autocast(q):
        q, k, v, joint_k, joint_v = autocast(q, k, v, joint_k, joint_v)
    x = Tensors(q, k, v, sinks, joint_k, joint_v)
    options = AttentionOptions(
        causal=causal, scale=scale, softcap=softcap, window=window, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, joint=joint, kv_layout=kv_layout, cu_seqlens=cu_seqlens, strategy=strategy,
        backend=backend, kv_comm_dtype=kv_comm_dtype,
    )  # fmt: skip
    return attend(x, options, layout)


def mla(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    layout: ShardedLayout | None = None,
    kv_layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: ChosenChoice | None = None,
    form: LatentForm | None = None,
    output_latents: bool = False,
    chosen: Tensor | None = None,
    block: int = 1,
    backend: SoftmaxBackend | ChosenBackendName | None = None,
    kv_comm_dtype: torch.dtype | None = None,
) -> MLAOutput:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): `attention` to keys and values made of latents.

        k_jh = [W_uk,h c_j ; r_j],     v_jh = W_uv,h c_j,     s_ij = scale · q_iᵀ k_j

    What travels between ranks, forward and backward, is c_j and r_j, L + R numbers a token for all heads.

    Args:
        q: ``[B, Tq, H, N + R]``, in each head first what meets W_uk, then the rotated part.
        latent: c ``[B, Tk, L]``, normalised as the model does it. k_rope: r ``[B, Tk, R]``, rotated; R may be 0.
        w_uk: ``[H, N, L]``. w_uv: ``[H, V, L]``. Their gradients under a layout are this rank's part. Of a
            ``kv_b_proj`` of weight ``W [H·(N + V), L]`` they are ``W.view(H, N + V, L).split([N, V], 1)``.
        scale: None: (N + R)**-0.5.
        strategy: how latents travel, with chosen ones as in `sparse_attention`; Ulysses sends every rank all of them,
            for its heads.
        form: "expanded": keys and values are made of each block of latents that arrives, and again in the backward
            pass; "absorbed": queries and results are taken through W_uk and W_uv instead (decoding); None: what takes
            fewer products.
        chosen, block: as in `sparse_attention`, whose backends there are then; latents have one head.
        output_latents: return the latents and rotary parts of the whole sequence, on every rank, for decoding.
        causal, softcap, window, sinks, dropout_p, dropout_seed, layout, kv_layout, cu_seqlens, backend: as `attention`.
        kv_comm_dtype: as `attention`, of latents and rotary parts, each with a scale a token; not with chosen ones.

    Returns:
        MLAOutput(o ``[B, Tq, H, V]``, lse ``[B, H, Tq]``, latents ``[B, T, L + R]``, without a gradient, or
        None).

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
        DisagreementError: the ranks' arguments do not fit together.
    """
    if not isinstance(output_latents, bool):
        refuse("mla", ArgumentError("output_latents", "True or False", repr(output_latents)), layout)
    for name, t in (("w_uk", w_uk), ("w_uv", w_uv)):
        if t is None:
            refuse("mla", ArgumentError(name, "a tensor of three dimensions", "None"), layout)
    if under_autocast(q):
        q, latent, k_rope, w_uk, w_uv = autocast(q, latent, k_rope, w_uk, w_uv)
    x = Tensors(q, _of_one_head(latent), _of_one_head(k_rope), sinks, up_k=w_uk, up_v=w_uv, chosen=chosen)
    options = AttentionOptions(
        causal=causal, scale=scale, softcap=softcap, window=window, dropout_p=dropout_p, dropout_seed=dropout_seed,
        kv_layout=kv_layout, cu_seqlens=cu_seqlens, strategy=strategy, backend=backend, form=form, block=block,
        kv_comm_dtype=kv_comm_dtype,
    )  # fmt: skip
    out, latents = attend(x, options, layout), None
    if output_latents:
        latents = torch.cat([latent, k_rope], -1).detach()
        keys = kv_layout or layout
        latents = latents if keys is None else keys.gather(latents)
    return MLAOutput(*out, latents)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    block: int = 1,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    layout: ShardedLayout | None = None,
    kv_layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: ChosenChoice | None = None,
    backend: ChosenBackendName | None = None,
) -> AttentionOutput:
    """Softmax attention of each query over the keys it has chosen, of those that `attention` would show it.

    Args:
        q, k, v: as in `attention`.
        chosen: int32 or int64 ``[B, Tq, Hk or 1, S]``, for all key heads or for each: places in the whole sequence (not
            in the document, nor among this rank's tokens), each of the first key of a chosen block; −1, or a place
            outside: none. Blocks of one query must not overlap: what is chosen twice counts twice. It has no gradient.
            With validate="always" both are refused.
        block: keys that a choice stands for: the one at its place and the next.
        strategy: "ring", "all_gather", "chosen", or by the cost. "chosen" counts the keys that each rank's queries have
            chosen, and sends these alone where that is fewer bytes over the busiest rank than all; its host waits for
            the counts, forward and backward. None or "auto": rank by rank where GPUs of a host copy from memory to
            memory; else "chosen" where a rank's queries together cannot choose half of all keys; else "all_gather".
        backend: None, "triton", "triton_sorted", "triton_blocks", "torch" or "reference"; None is PyTorch on a CPU and
            in fp64, on a GPU "triton_sorted" with latents and "triton" otherwise, whose gradients of k and v are summed
            in an order that varies (not so under torch.use_deterministic_algorithms). "triton_blocks" takes blocks of
            at least 16 keys, K and V up to 128, and forms every sum in the same order.
        causal, scale, window, sinks, layout, kv_layout, cu_seqlens: as in `attention`.

    Returns:
        AttentionOutput(o ``[B, Tq, H, V]``, lse ``[B, H, Tq]``). A query that sees no key has o = 0 and lse = −∞.
        Memory goes with T_local · S, never T².

    Raises:
        ArgumentError, UnsupportedError: by the name of the argument; under a layout on every rank.
        DisagreementError: the ranks' arguments do not fit together.
    """
    if chosen is None:
        what = ArgumentError("chosen", "an int32 or int64 tensor [B, Tq, Hk or 1, S]", "None")
        refuse("sparse_attention", what, layout)
    if under_autocast(q):
        q, k, v = autocast(q, k, v)
    options = AttentionOptions(
        causal=causal, scale=scale, window=window, kv_layout=kv_layout, cu_seqlens=cu_seqlens, strategy=strategy,
        backend=backend, block=block,
    )  # fmt: skip
    return attend(Tensors(q, k, v, sinks, chosen=chosen), options, layout)


def _of_one_head(t: Tensor) -> Tensor:
    """``[B, T, D] → [B, T, 1, D]``; anything else as it came, to be refused with the other arguments."""
    return t[:, :, None] if isinstance(t, Tensor) and t.dim() == 3 and t.layout is torch.strided else t
