"""Mixers of the delta rules: gated delta nets and Kimi delta attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....recurrences import gated_delta_rule, kda
from ..call import ModelCall
from .convolution import causal_conv1d_fn


def _chunk(rule: Callable) -> Callable:
    """A chunked delta rule of fla: tensors ``[B, T, H, ·]``, states ``[B, H, K, V]``."""

    def operator(
        call: ModelCall,
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
        return tuple(
            call.operator(
                rule,
                query,
                key,
                value,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm=use_qk_l2norm_in_kernel,
            )
        )

    return operator


GATED_DELTA = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": _chunk(gated_delta_rule)}
KIMI_DELTA = {"causal_conv1d_fn": causal_conv1d_fn, "chunk_kimi_delta_attention": _chunk(kda)}

MIXERS = {
    "Qwen3NextGatedDeltaNet": GATED_DELTA,
    "Qwen3_5GatedDeltaNet": GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
    "Qwen4ExpTextGatedDeltaNet": GATED_DELTA,
    "OlmoHybridGatedDeltaNet": GATED_DELTA,
    "LaraMiniGatedDeltaNet": GATED_DELTA,
    "KimiLinearDeltaAttention": KIMI_DELTA,
    "BailingHybridDeltaAttention": KIMI_DELTA,
    "Glm5NextTextLinearAttention": KIMI_DELTA,
}
