"""fla-core's functions, with its signatures."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...checks import is_floats
from ...conv import short_conv
from ...errors import ArgumentError, UnsupportedError, describe_tensor
from ...recurrences import gated_delta_rule, kda
from .call import FlaCall
from .context import together

HARMLESS = {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "max_num_seqs", "safe_gate"}
"""Keywords that do not change the result: of how upstream computes."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule.

    ``q, k [B, T, H, K]``, ``v [B, T, HV, V]``, ``g, beta [B, T, HV]``; states ``[N, HV, K, V]``.

    Other keywords: use_gate_in_kernel, A_log, dt_bias.

    Raises:
        ArgumentError, UnsupportedError: by name; as upstream, states with a context.
    """
    call = FlaCall(q, g, beta, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)

    def prepare() -> tuple[Tensor, Tensor]:
        _refuse(kwargs, {"use_gate_in_kernel", "A_log", "dt_bias"})
        call.check(cp_context)
        gate = call.gate(kwargs.get("use_gate_in_kernel", False), kwargs)
        return gate, call.strength(use_beta_sigmoid_in_kernel, allow_neg_eigval)

    layout, (gate, beta) = together("gated_delta_rule", cp_context, prepare)
    how = dict(scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel) | call.where(layout)
    return call.results(gated_delta_rule(q, k, v, gate, beta, **how))


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: as `chunk_gated_delta_rule`, with ``g [B, T, HV, K]``.

    Other keywords: A_log ``[HV]``, dt_bias ``[HV · K]``. `lower_bound` changes the gate that is made here; of one that
    is given it is a promise.

    Raises:
        ArgumentError, UnsupportedError: by name; as upstream, states with a context.
    """
    call = FlaCall(q, g, beta, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)

    def prepare() -> tuple[Tensor, Tensor]:
        _expect_false(return_intermediate_states=return_intermediate_states, use_graph=use_graph)
        _refuse(kwargs, {"A_log", "dt_bias"})
        call.check(cp_context)
        if safe_gate and use_gate_in_kernel and lower_bound is None:
            raise ArgumentError("lower_bound", "one with safe_gate and use_gate_in_kernel", "None")
        gate = call.gate(use_gate_in_kernel, kwargs, lower_bound)
        return gate, call.strength(use_beta_sigmoid_in_kernel, allow_neg_eigval)

    layout, (gate, beta) = together("kda", cp_context, prepare)
    how = dict(scale=scale, lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm_in_kernel) | call.where(layout)
    return call.results(kda(q, k, v, gate, beta, **how))


def causal_conv1d_cp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int | None = None,
    backend: str = "triton",
    residual: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel, ``x [1, T, D]``, ``weight [D, W]``, over the ranks of a context.

    Raises:
        ArgumentError: by name.
    """
    if cp_context is None:
        raise ArgumentError("cp_context", "one of fla-core's build_cp_context", "None")

    def prepare() -> None:
        if activation not in (None, "silu", "swish"):
            raise ArgumentError("activation", "None, 'silu' or 'swish'", repr(activation))
        if backend not in ("triton", "cuda", "mix"):
            raise ArgumentError("backend", "'triton', 'cuda' or 'mix', which are one here", repr(backend))
        if residual is not None and not (is_floats(residual) and is_floats(x) and residual.shape == x.shape):
            raise ArgumentError("residual", f"a float tensor like x, {describe_tensor(x)}", describe_tensor(residual))

    layout, _ = together("short_conv", cp_context, prepare)
    y = short_conv(x, weight, bias, "silu" if activation else None, layout=layout).o
    return y if residual is None else y + residual


def _expect_false(**flags: bool) -> None:
    for name, value in flags.items():
        if value:
            raise UnsupportedError(name, "False", value)


def _refuse(keywords: dict[str, Any], known: set[str]) -> None:
    unknown = keywords.keys() - known - HARMLESS
    if unknown:
        raise UnsupportedError("kwargs", f"{', '.join(sorted(known | HARMLESS))}", ", ".join(sorted(unknown)))
