"""mLSTM, the matrix memory of xLSTM: exponential input gates, a normaliser, and a stabiliser that bounds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..blockwise import by_block
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import DECAY, KEY, QUERY, VALUE, Argument, state_dtype_of
from .definition import CommonOptions
from .recurrence import recurrence
from .retention import simple_gla
from .stabiliser import stabiliser

States = tuple[Tensor, Tensor, Tensor]


def token(S: States, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[States, Tensor]:
    """One token of mLSTM; m carries no gradient."""
    C, n, m = S
    m = m.detach()
    new = torch.maximum(f + m, i).detach()
    kept, written = (f + m - new).exp(), (i - new).exp()
    C = kept[..., None, None] * C + written[..., None, None] * outer(k, v)
    n = kept[..., None] * n + written[..., None] * k
    size = torch.maximum((n * q).sum(-1).abs(), torch.exp(-new))
    return (C, n, new), read(C, q) / size[..., None]


@recurrence(
    paper="Beck et al. 2024, arXiv 2405.04517, eq. 19–27",
    equation="C ← e^f C + e^i k vᵀ, n ← e^f n + e^i k, o = Cᵀ q / max(|nᵀ q|, 1)",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, i=Argument("BTH"), f=DECAY),
    token=token,
    states=("HKV", "HK", "H"),
    same_bits=True,
)
def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, options: CommonOptions) -> LinearAttentionOutput:
    """mLSTM: C ← e^f C + e^i k vᵀ, n ← e^f n + e^i k, o = Cᵀ q / max(|nᵀ q|, 1), with q times `scale`.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        i: input gate before its exponential ``[B, T, H]``. f: logarithm of the forget gate ``[B, T, H]``, ≤ 0.

    States are ``(C [N,H,K,V], n [N,H,K], m [N,H])``, C and n times e^−m, where m ← max(f + m, i) from zero; m carries
    no gradient.
    """
    start: Any = (None, None, None) if options.initial_state is None else options.initial_state
    C, n, m = start
    gauge = stabiliser(i, f, m, options)
    written, g = by_block(_written, i, f, v, gauge.before, gauge.after, layout=options.layout)
    o, S = simple_gla(
        q, k, written.to(q.dtype), g, scale=options.scale,
        initial_state=None if C is None else torch.cat([C, n[..., None].to(C.dtype)], -1),
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    final: Any = S
    state: Any = (final[..., :-1], final[..., -1], gauge.final) if options.output_final_state else None
    return LinearAttentionOutput(by_block(_read, o, v, gauge.after, layout=options.layout), state)


def _written(i: Tensor, f: Tensor, v: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens write, v and the one of n beside it, and their log-decays, both in the stabiliser's gauge."""
    wide = state_dtype_of({"i": i, "f": f, "v": v})
    size = (i.to(wide) - after.to(wide)).exp()[..., None]
    f = f.to(wide)
    g = f + torch.minimum((before - after).to(wide), -f.detach())  # never above zero by a rounding
    return torch.cat([size * v, size], -1), g


def _read(o: Tensor, v: Tensor, after: Tensor) -> Tensor:
    """o over the size of its normaliser, its last column."""
    o = o.to(torch.promote_types(o.dtype, torch.float32))
    size = torch.maximum(o[..., -1:].abs(), torch.exp(-after.to(o.dtype))[..., None])
    return (o[..., :-1] / size).to(v.dtype)
