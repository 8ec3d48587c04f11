"""Mixers of the delta rules: gated delta nets and Kimi delta attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ....recurrences import gated_delta_rule, kda
from ..call import ModelCall
from .convolution import causal_conv1d_fn
from .entry import OfLayer


def _chunk(rule: Callable, **options: object) -> Callable:
    """A chunked delta rule of fla: tensors ``[B, T, H, ·]``, states ``[B, H, K, V]``; `options` of ours."""

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
                **options,
            )
        )

    return operator


def gate_bound(layer: nn.Module) -> float | None:
    """The log-decay that the gate of a layer of Kimi's never falls below; None: it has no bound."""
    gate = layer.forget_gate
    if not getattr(gate, "safe_gate", True):
        return None
    return getattr(gate, "safe_gate_lower_bound", getattr(gate, "lower_bound", None))


def _kda(lower_bound: float | None) -> Callable:
    return _chunk(kda, lower_bound=lower_bound)


GATED_DELTA = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": _chunk(gated_delta_rule)}
KIMI_DELTA: dict[str, Callable | OfLayer] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "chunk_kimi_delta_attention": OfLayer(gate_bound, _kda),
}

MIXERS: dict[str, Mapping[str, Callable | OfLayer]] = {
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
