"""Linear attention: S ← S + k vᵀ. Katharopoulos et al. 2020, arXiv 2006.16236, eq. 10–12."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra import Rule
from ..checks import check_flag
from ..kernels import Inputs
from .arguments import KEY, QUERY, VALUE
from .definition import Recurrence
from .recurrence import recurrence

EPS = 1e-10


@recurrence(
    paper="Katharopoulos et al. 2020, arXiv 2006.16236, eq. 10–12",
    equation="S ← S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE),
)
def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, normalize: bool = False) -> Recurrence:
    """Linear attention: S ← S + k vᵀ, o = scale · Sᵀ q.

    Args:
        q, k: ``[B, T, Hk, K]``, after the feature map.
        v: ``[B, T, H, V]`` with H a multiple of Hk.
        causal: False: every token reads the state after its document's last token (diffusion models).
        normalize: divide by ``scale · qᵀ Σ k + 1e-10``. The running sum of keys rides as one more value column, so
            states are then ``[N, H, K, V+1]``: ``[..., :V]`` is Σ k vᵀ, ``[..., V]`` is Σ k.
    """
    check_flag("normalize", normalize)
    rule = Rule("additive", "none")
    if not normalize or not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return Recurrence(rule, Inputs(q, k, v), causal=causal)
    wide = torch.promote_types(v.dtype, torch.float32)
    with_one = torch.cat([v.to(wide), v.new_ones(*v.shape[:-1], 1, dtype=wide)], -1)

    def readout(o: Tensor) -> Tensor:
        return (o[..., :-1] / (o[..., -1:] + EPS)).to(v.dtype)

    return Recurrence(rule, Inputs(q.to(wide), k.to(wide), with_one), causal=causal, readout=readout)
