"""RWKV-6: tokens read the state before their own write, and their own write with a bonus of its own.

A token that reads before it writes is the next token's state: keys, values and decays are shifted by one token (one row
from the neighbour), so that gated linear attention over them holds S_{t−1} when token t reads. What a document's last
token writes is added to the final state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blockwise import by_block, fixed
from ..conv import token_shift
from ..kernels.fused.bonus import bonus
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import CHANNEL_DECAY, KEY, QUERY, VALUE, Argument
from .definition import CommonOptions
from .gla import gla
from .recurrence import recurrence


def token(S: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token of RWKV-6."""
    o = read(S, r) + (r * u * k).sum(-1, keepdim=True) * v
    return w.exp()[..., None] * S + outer(k, v), o


@recurrence(
    paper="Peng et al. 2024, arXiv 2404.05892, eq. 19",
    equation="o = (S + diag(u) k vᵀ)ᵀ r, then S ← diag(e^w) S + k vᵀ",
    arguments=dict(r=QUERY, k=KEY, v=VALUE, w=CHANNEL_DECAY, u=Argument("HK")),
    token=token,
    same_bits=True,
)
def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, options: CommonOptions) -> LinearAttentionOutput:
    """RWKV-6 (Finch): o = scale · (S + diag(u) k vᵀ)ᵀ r, then S ← diag(e^w) S + k vᵀ.

    The paper has no scale: pass ``scale=1.0`` for its form.

    Args:
        r, k: ``[B, T, Hk, K]``, receptance and key. v: ``[B, T, H, V]`` with H a multiple of Hk.
        w: log-decay of each key channel ``[B, T, H, K]``, ≤ 0. u: bonus of the token itself ``[H, K]``.
    """
    before, last = _before((k, v, w), options)
    o, S = gla(
        r, *before, scale=options.scale, initial_state=options.initial_state,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip

    def with_own(o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        return bonus(o, r, k, v, u, options.scale)  # type: ignore[arg-type]

    o = by_block(with_own, o, r, k, v, layout=options.layout, shared=(u,))
    if S is None:
        return LinearAttentionOutput(o, None)
    last = [x.to(S.dtype) for x in last]
    if not fixed(options.layout):
        return LinearAttentionOutput(o, _after(S, *last))
    each = zip(*(x.split(1) for x in (S, *last)))  # whatever other documents there are
    return LinearAttentionOutput(o, torch.cat([_after(*(x.clone() for x in document)) for document in each]))


def _after(S: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """States after documents' last tokens."""
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    return w.exp()[..., None] * S + k[..., None] * v[..., None, :]


def _before(tensors: tuple[Tensor, ...], options: CommonOptions) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens' tensors one token later, and those of documents' last tokens, if final states are wanted."""
    final = options.output_final_state
    if options.layout is None:
        moved = [token_shift(x.flatten(2), output_final_state=final, **options.inner) for x in tensors]
        ends = [m.final_state.unflatten(-1, x.shape[2:]) for m, x in zip(moved, tensors) if m.final_state is not None]
        return [m.o.unflatten(-1, x.shape[2:]) for m, x in zip(moved, tensors)], ends
    rows, sizes = _joined(*tensors)
    joined = token_shift(rows, output_final_state=final, **options.inner)
    last = joined.final_state
    ends = [] if last is None else [x[:, 0] for x in _parted(last[:, None], sizes, tensors)]
    return _parted(joined.o, sizes, tensors), ends


def _joined(*tensors: Tensor) -> tuple[Tensor, list[int]]:
    """Tokens' tensors as rows of one, so that one message carries them."""
    flat = [x.flatten(2) for x in tensors]
    dtype = flat[0].dtype
    for x in flat:
        dtype = torch.promote_types(dtype, x.dtype)
    return torch.cat([x.to(dtype) for x in flat], -1), [x.shape[-1] for x in flat]


def _parted(rows: Tensor, sizes: list[int], like: tuple[Tensor, ...]) -> list[Tensor]:
    """The reverse of `_joined`."""
    return [x.unflatten(-1, y.shape[2:]).to(y.dtype) for x, y in zip(rows.split(sizes, -1), like)]
