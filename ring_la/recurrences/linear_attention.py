"""Linear attention: S ← S + k vᵀ. Katharopoulos et al. 2020, arXiv 2006.16236, eq. 10–12."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra import Rule
from ..checks import check_flag, check_least
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..kernels import Inputs
from .arguments import KEY, QUERY, VALUE
from .definition import Normalizer, Recurrence
from .recurrence import recurrence

EPS = 1e-10
RULE = Rule("additive", "none")


@recurrence(
    paper="Katharopoulos et al. 2020, arXiv 2006.16236, eq. 10–12",
    equation="S ← S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE),
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    normalize: bool = False,
    normalizer_q: Tensor | None = None,
    normalizer_k: Tensor | None = None,
    eps: float = EPS,
) -> Recurrence:
    """Linear attention: S ← S + k vᵀ, o = scale · Sᵀ q.

    Args:
        q, k: ``[B, T, Hk, K]``, after the feature map.
        v: ``[B, T, H, V]`` with H a multiple of Hk.
        causal: False: every token reads the state after its document's last token (diffusion models).
        normalize: divide by ``scale · qᵀ Σ k + eps``. States are then ``[N, H, K, V+1]``: ``[..., :V]`` is Σ k vᵀ,
            ``[..., V]`` is Σ k.
        normalizer_q, normalizer_k: the q and k of that denominator, like q and k, where they are others (SANA-Video
            rotates those of the numerator alone). Both with normalize=True and causal=False; the sum of keys travels
            with the state, in one exchange.
        eps: what is added to the denominator.
    """
    check_flag("normalize", normalize)
    check_least("eps", eps)
    own = _own_normalizer(q, k, normalizer_q, normalizer_k, normalize and not causal)
    if not normalize or not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return Recurrence(RULE, Inputs(q, k, v), causal=causal)
    return _normalized(q, k, v, eps, causal, own)


def _normalized(
    q: Tensor, k: Tensor, v: Tensor, eps: float, causal: bool, own: tuple[Tensor, Tensor] | None
) -> Recurrence:
    """Divided by a denominator of q and k or of its `own`: where tokens have an order, as one more value column."""
    if not causal:
        one = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        inputs = Inputs(q.to(one), k.to(one), v.to(one))
        denominator = Normalizer(*((inputs.q, inputs.k) if own is None else own), eps)
        rounded = None if v.dtype == one else lambda o: o.to(v.dtype)
        return Recurrence(RULE, inputs, causal=False, normalizer=denominator, readout=rounded)
    wide = torch.promote_types(v.dtype, torch.float32)

    def readout(o: Tensor) -> Tensor:
        return (o[..., :-1] / (o[..., -1:] + eps)).to(v.dtype)

    with_one = torch.cat([v.to(wide), v.new_ones(*v.shape[:-1], 1, dtype=wide)], -1)
    return Recurrence(RULE, Inputs(q.to(wide), k.to(wide), with_one), readout=readout)


def _own_normalizer(
    q: object, k: object, normalizer_q: object, normalizer_k: object, allowed: bool
) -> tuple[Tensor, Tensor] | None:
    """A denominator's own q and k, if given, after checking that they are like q and k."""
    if normalizer_q is None and normalizer_k is None:
        return None
    own: list[Tensor] = []
    for name, given, like in (("normalizer_q", normalizer_q, q), ("normalizer_k", normalizer_k, k)):
        if isinstance(given, Tensor) and isinstance(like, Tensor) and _look(given) == _look(like):
            own.append(given)
        else:
            expected = f"{describe_tensor(like)}, as {name[-1]}, with the other one"
            raise ArgumentError(name, expected, describe_tensor(given))
    if not allowed:
        raise UnsupportedError("normalizer_q", "normalize=True and causal=False with it", "other ones")
    return own[0], own[1]


def _look(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device
