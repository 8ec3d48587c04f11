"""Mixers of Mamba-2."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ....outputs import LinearAttentionOutput
from ....recurrences import mamba2
from ..call import ModelCall
from .convolution import causal_conv1d_fn


def chunk_scan(
    call: ModelCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """``mamba_chunk_scan_combined`` of mamba_ssm: ``hidden_states [B, T, H, V]``, states ``[B, H, V, K]``.

    The time step is clamped to `dt_limit` after its bias and softplus, in fp32.
    """
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = None if initial_states is None else initial_states.mT
    how: dict[str, Any] = dict(A=A, D=D, initial_state=state, output_final_state=return_final_states)
    out = call.operator(_mamba2, hidden_states, dt, B, C, **how)
    o = out.o.contiguous()
    return (o, out.final_state.mT) if return_final_states else o


def _mamba2(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, A: Tensor, **how: Any) -> LinearAttentionOutput:
    """`mamba2`, the tokens' tensors first."""
    return mamba2(x, dt, A, B, C, **how)


def no_fused_kernel(call: ModelCall, *_: object, **__: object) -> None:
    """For a whole mixer in one kernel (``mamba_split_conv1d_scan_combined``, ``mamba_inner_fn``): None, and the mixer
    goes step by step."""


MAMBA2 = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba2_split_conv1d_scan_combined": no_fused_kernel,
    "mamba2_chunk_scan": chunk_scan,
}

MIXERS = {
    "Mamba2Mixer": MAMBA2,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
}
