"""Gates per key channel: gated linear attention and HGRN-2."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra import Rule
from ..checks import is_floats
from ..errors import ArgumentError, describe_tensor
from ..kernels import Inputs
from .arguments import CHANNEL_DECAY, KEY, QUERY, VALUE, Argument
from .definition import Recurrence
from .recurrence import recurrence


@recurrence(
    paper="Yang et al. 2023, arXiv 2312.06635, eq. 3",
    equation="S ← diag(e^g) S + k vᵀ",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=CHANNEL_DECAY),
)
def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Recurrence:
    """Gated linear attention: S ← diag(exp g) S + k vᵀ.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]`` with H a multiple of Hk.
        g: log-decay of each key channel, ``[B, T, H, K]`` (or Hk heads), ≤ 0.
    """
    return Recurrence(Rule("additive", "diagonal"), Inputs(q, k, v, g))


@recurrence(
    paper="Qin et al. 2024, arXiv 2404.07904",
    equation="S ← diag(e^g) S + (1 − e^g) vᵀ",
    arguments=dict(q=QUERY, g=Argument("BTGK", "log decay"), v=VALUE),
)
def hgrn2(q: Tensor, g: Tensor, v: Tensor) -> Recurrence:
    """HGRN-2: gated linear attention whose key is what the gate lets go.

    ``S ← diag(exp g) S + (1 − exp g) vᵀ``.

    Args:
        q: ``[B, T, Hk, K]``. g: log forget gate ``[B, T, Hk, K]``, ≤ 0. v: ``[B, T, H, V]``, the input.
    """
    for name, x in (("q", q), ("g", g)):
        if not is_floats(x):
            raise ArgumentError(name, "a dense tensor of fp16, bf16, fp32 or fp64", describe_tensor(x))
    wide = torch.promote_types(torch.promote_types(g.dtype, q.dtype), torch.float32)
    k = -torch.expm1(g.to(wide)).to(q.dtype)
    return Recurrence(Rule("additive", "diagonal"), Inputs(q, k, v, g), names={"k": "g"})
