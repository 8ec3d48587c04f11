"""Keys that share: what a token writes is its part of all that has been written, so decays follow from the keys.

    Z ← Z + e^k,        k̂ = e^k / Z,        e^g = 1 − k̂ = Z before / Z

Each channel's state is then a weighted mean of the values. Z is kept divided by its largest term (`stabiliser`), so
that logits may be large; states have ``z = log(1 + Z)``, which is zero where nothing has been written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blockwise import by_block
from ..kernels.fused.shares import can_share, weight_shares
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import QUERY, VALUE, Argument, state_dtype_of
from .definition import CommonOptions
from .erase import keys_of
from .gla import gla
from .gsa import gated_slot_attention
from .hgrn import hgrn
from .recurrence import recurrence
from .stabiliser import stabiliser

NEVER = -1e4
"""The logarithm of no weight."""
FORGOTTEN = -80.0
"""A log-decay that leaves nothing."""


class Shares(NamedTuple):
    """k̂ and the log-decays ``[B, T, H, K]``, and z after each document ``[N, H, K]`` where it is asked for."""

    written: Tensor
    g: Tensor
    z: Tensor | None


def shares(k: Tensor, z: Tensor | None, options: CommonOptions) -> Shares:
    """The shares of logits k ``[B, T, H, K]``, given z before each document (None: zero)."""
    wide, H, x = state_dtype_of({"k": k}), k.shape[2], k.flatten(2)
    if z is None:
        log = x.new_full((_documents(k, options), x.shape[2]), NEVER, dtype=wide)
    else:
        log = _logarithm(z.flatten(1).to(wide))
    final: Tensor | None
    if options.backend != "torch" and options.layout is None and can_share(x):
        written, g, end = weight_shares(x, log, options.cu_seqlens)
        wanted = options.output_final_state
        final = torch.where(end > NEVER / 2, F.softplus(end, threshold=1e4), 0.0) if wanted else None
    else:
        written, g, final = _by_parts(x, log, z is None, options)
    written, g = (t.unflatten(2, (H, -1)) for t in (written, g))
    return Shares(written, g, None if final is None else final.unflatten(1, (H, -1)))


def _by_parts(
    x: Tensor, log: Tensor, fresh: bool, options: CommonOptions
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """What the kernel gives, and z, in the operations of `hgrn` and `stabiliser`. `log` is log Z before each document;
    `fresh`: it is that of nothing."""
    wide, layout = log.dtype, options.layout
    m = log.detach()
    Z = None if fresh else torch.where(m > NEVER, (log - m).exp(), 0.0)
    gauge = stabiliser(x, torch.zeros_like(x), m, options)

    def weights(x: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return (x.to(wide) - after.to(wide)).exp(), (before - after).to(wide).clamp(FORGOTTEN, 0.0)

    weight, g = by_block(weights, x, gauge.before, gauge.after, layout=layout)
    total, end = hgrn(
        weight, g, initial_state=Z, output_final_state=options.output_final_state, **options.scan
    )  # fmt: skip

    def parts(weight: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        written = weight / total
        return written, torch.log1p(-written.clamp(max=1 - torch.finfo(wide).eps))

    written, g = by_block(parts, weight, total, layout=layout)
    return written, g, None if end is None else _finished(end, gauge.final.to(wide))


def _documents(k: Tensor, options: CommonOptions) -> int:
    layout = options.layout
    if options.cu_seqlens is not None:
        return options.cu_seqlens.numel() - 1
    return layout.num_documents if layout is not None and layout.packed else k.shape[0]


def _logarithm(z: Tensor) -> Tensor:
    """log Z, given ``z = log(1 + Z)``."""
    some = z > 0
    full = torch.where(some, z, 1.0)
    return torch.where(some, full + torch.log(-torch.expm1(-full)), NEVER)


def _finished(Z: Tensor, m: Tensor) -> Tensor:
    """``log(1 + Z e^m)``."""
    some = Z > 0
    return torch.where(some, F.softplus(torch.where(some, Z, 1.0).log() + m, threshold=1e4), 0.0)


def _shared(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one token: z after it, what is kept and what is written of a state."""
    before = torch.expm1(z)
    after = before + k.exp()
    return torch.log1p(after), before / after, k.exp() / after


def lightnet_token(
    states: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One token of LightNet."""
    S, z = states
    z, kept, written = _shared(z, k)
    S = kept[..., None] * S + outer(written, v)
    return (S, z), read(S, q)


@recurrence(
    paper="Qin et al. 2024, arXiv 2405.21022, its additive decay, as in fla-core 0.6.0's ops/lightnet",
    equation="Z ← Z + e^k, S ← (1 − k̂) ⊙ S + k̂ vᵀ, k̂ = e^k / Z",
    arguments=dict(q=QUERY, k=Argument("BTHK"), v=VALUE),
    token=lightnet_token,
    states=("HKV", "HK"),
    same_bits=True,
)
def lightnet(q: Tensor, k: Tensor, v: Tensor, *, options: CommonOptions) -> LinearAttentionOutput:
    """LightNet: Z ← Z + e^k, S ← (1 − k̂) ⊙ S + k̂ vᵀ with k̂ = e^k / Z, what has been written of each key channel.

    Args:
        q: ``[B, T, Hk, K]``. k: logits of keys ``[B, T, H, K]`` (or Hk heads). v: ``[B, T, H, V]`` with H a multiple
            of Hk.

    States are ``(S [N,H,K,V], z [N,H,K])``, ``z = log(1 + Z)``.
    """
    S, z = (None, None) if options.initial_state is None else options.initial_state
    share, heads = shares(k, z, options), v.shape[2]
    q = by_block(lambda x: keys_of(heads, x), q, layout=options.layout)
    o, S = gla(
        q, share.written.to(q.dtype), v, share.g, scale=options.scale, initial_state=S,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    final: Any = None if S is None else (S, share.z)
    return LinearAttentionOutput(o, final)


def abc_token(
    states: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, s: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """One token of ABC."""
    keys, values, z = states
    z, kept, written = _shared(z, s)
    keys = keys * kept[..., None, :] + outer(k, written)
    values = values * kept[..., None] + outer(written, v)
    return (keys, values, z), read(values, read(keys, q).softmax(-1))


@recurrence(
    paper="Peng et al. 2022, arXiv 2110.02488, with the shares of fla-core 0.6.0's ops/abc",
    equation="Z ← Z + e^s, ŝ = e^s / Z, then gated slot attention with e^g = 1 − ŝ",
    arguments=dict(q=QUERY, k=Argument("BTGK", "key"), v=VALUE, s=Argument("BTHM")),
    token=abc_token,
    states=("HKM", "HMV", "HM"),
    sizes=dict(M=3),
    same_bits=True,
)
def abc_attention(q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, options: CommonOptions) -> LinearAttentionOutput:
    """ABC, attention with bounded memory: gated slot attention whose slots hold weighted means, of weights e^s.

    Z ← Z + e^s, ŝ = e^s / Z, Hk ← Hk diag(1 − ŝ) + k ŝᵀ, Hv ← diag(1 − ŝ) Hv + ŝ vᵀ, o = Hvᵀ softmax(scale · Hkᵀ q).

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk. s: logits of slots ``[B, T, H, M]``.

    States are ``(Hk [N,H,K,M], Hv [N,H,M,V], z [N,H,M])``, ``z = log(1 + Z)``.
    """
    start, z = (None, None) if options.initial_state is None else (options.initial_state[:2], options.initial_state[2])
    share = shares(s, z, options)
    o, slots = gated_slot_attention(
        q, k, v, share.written, share.g, scale=options.scale, initial_state=start,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    final: Any = None if slots is None else (*slots, share.z)
    return LinearAttentionOutput(o, final)
