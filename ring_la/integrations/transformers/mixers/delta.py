"""Mixers of the delta rules."""

from __future__ import annotations

from torch import Tensor

from ....recurrences import gated_delta_rule
from ..call import Call
from .convolution import causal_conv1d_fn


def chunk_gated_delta_rule(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule`` of fla: tensors ``[B, T, H, ·]``, states ``[B, H, K, V]``."""
    return tuple(
        gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            **call.split,
        )
    )


GATED_DELTA = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": chunk_gated_delta_rule}

MIXERS = {
    "Qwen3NextGatedDeltaNet": GATED_DELTA,
}
