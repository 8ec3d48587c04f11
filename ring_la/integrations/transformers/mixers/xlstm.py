"""xLSTM's matrix memory: gated linear attention whose keys are weighted and whose result is normalised."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import UnsupportedError
from ....recurrences import simple_gla
from ..call import ModelCall


def mlstm(
    call: ModelCall,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """``xLSTMBackend``: tensors ``[B, H, T, ·]`` (Beck et al. 2024, arXiv 2405.04517, eq. 19–27).

    ``S ← σ(f) S + exp(i) k vᵀ``, with v = 1 the normaliser n, and ``h = Sᵀq / (max(|nᵀq|, 1) + ε eᵐ)``. The library
    keeps everything divided by ``eᵐ``, the largest weight so far. With the gates capped nothing overflows without that,
    and m is needed for its ε alone.
    """
    if layer.config.gate_soft_cap is None:
        raise UnsupportedError("model", "an xLSTM with gate_soft_cap", "one without: its weights may overflow")
    if c_initial is not None:
        hint = "Set config.max_inference_chunksize to the length of the prompt"
        raise UnsupportedError("model", "one call of the memory for all tokens", "a prompt cut into chunks", hint)
    q, k, v, i, f = (x.transpose(1, 2).float() for x in (query, key, value, igate, fgate))
    forget = F.logsigmoid(f)
    k, v = k * i.exp()[..., None], F.pad(v, (0, 1), value=1.0)  # one more value column is the normaliser's
    out = simple_gla(q, k, v, forget, **call.split).o
    eps = layer.config.eps * _largest(call, i.detach(), forget.detach()).exp()[..., None]
    h = out[..., :-1] / (out[..., -1:].abs().clamp(min=1.0) + eps)
    return h.to(query.dtype).transpose(1, 2), None


def _largest(call: ModelCall, i: Tensor, forget: Tensor) -> Tensor:
    """m ``[B, T, H]``: the logarithm of the largest weight in each token's memory, that of its start included."""
    both = torch.cat([i, forget], -1).double()
    both = both if call.layout is None else call.layout.gather(both)
    i, forget = both.chunk(2, -1)
    cu = call.cu_seqlens.tolist() if call.layout is None else call.layout.cu_seqlens
    parts = []
    for start, stop in zip(cu, cu[1:]):
        decay = forget[:, start:stop].cumsum(1)
        since = (i[:, start:stop] - decay).cummax(1).values.clamp(min=0.0)
        parts.append(decay + since)
    m = torch.cat(parts, 1).float()
    return m if call.layout is None else call.layout.shard(m)


MIXERS = {"xLSTMBackend": mlstm}
UNCACHED = {"xLSTMBackend"}
