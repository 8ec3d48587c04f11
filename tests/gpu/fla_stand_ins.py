"""Ours under the arguments of fla-core's operators: what `tests.gpu.fla_suite` puts in their place.

A stand-in that adapts takes fla-core's arguments by its names, and leaves to `ring_la` what both name alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.integrations import fla as adapters


class StandIn(NamedTuple):
    """Ours in the place of functions of a package of ``fla.ops``.

    Attributes:
        functions: separated by blanks. ours: takes the arguments by our names.
        names: our names of its arguments, where they differ.
        spread: states come one by one behind the output, not as one.
        as_theirs: ours has its signature and its results.
    """

    package: str
    functions: str
    ours: Callable[..., Any]
    names: dict[str, str] = {}
    spread: bool = False
    as_theirs: bool = False


def _simple_gla(q: Any, k: Any, v: Any, g: Any = None, g_gamma: Any = None, **more: Any) -> Any:
    if g_gamma is not None:
        return ring_la.retention(q, k, v, g_gamma, **more)
    return ring_la.simple_gla(q, k, v, g, **more)


def _linear(q: Any, k: Any, v: Any, normalize: bool = False, initial_state: Any = None, **more: Any) -> Any:
    """States of a normalised call are (S, z ``[N, 1, H, K]``) there, and z is one more value column here."""
    if not normalize:
        return ring_la.linear_attention(q, k, v, initial_state=initial_state, **more)
    if initial_state is not None:
        S, z = initial_state
        initial_state = torch.cat([S, z[:, 0, ..., None].to(S.dtype)], -1)
    out = ring_la.linear_attention(q, k, v, normalize=True, initial_state=initial_state, **more)
    if out.final_state is None:
        return out
    return out._replace(final_state=(out.final_state[..., :-1], out.final_state[..., -1][:, None]))


def _delta_product(q: Any, k: Any, v: Any, beta: Any, num_householder: int, g: Any = None, **more: Any) -> Any:
    k, v, beta = (x.unflatten(1, (-1, num_householder)) for x in (k, v, beta))
    g = q.new_zeros(beta[:, :, 0].shape, dtype=torch.float32) if g is None else g
    return ring_la.gated_delta_product(q, k, v, g=g, beta=beta, **more)


def _comba(q: Any, k: Any, v: Any, p: Any, g: Any, use_qk_l2norm: bool = False, **more: Any) -> Any:
    if use_qk_l2norm:  # of p, too
        p = (p * torch.rsqrt(p.float().square().sum(-1, keepdim=True) + 1e-6)).to(q.dtype)
    return ring_la.comba(q, k, v, p=p, g=g, use_qk_l2norm=use_qk_l2norm, **more)


def _gdn2(
    g: Any, use_gate_in_kernel: bool = False, A_log: Any = None, dt_bias: Any = None, lower_bound: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    gate = dict(use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias)
    return ring_la.gdn2(g=adapters._gate(g, gate, lower_bound), **more)


def _slots(q: Any, k: Any, **more: Any) -> Any:
    if q.shape[2] != k.shape[2]:
        pytest.skip("ring_la's has no queries that share keys")
    return ring_la.gated_slot_attention(q, k, **more)


def _iplr(a: Any, **more: Any) -> Any:
    return ring_la.dplr_delta_rule(a=a, g=a.new_zeros(a.shape, dtype=torch.float32), **more)


def _rwkv7_kk(kk: Any, a: Any, **more: Any) -> Any:
    return ring_la.rwkv7(a=-kk, b=kk * a, **more)


def _mesa(initial_state: Any = None, h_kv_init: Any = None, **more: Any) -> Any:
    """It has no scale."""
    states = None if initial_state is None else (initial_state, h_kv_init)
    return ring_la.mesa_net(initial_state=states, scale=1.0, **more)


def _mesa_step(**given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One token of ``[B, H, …]`` tensors."""
    if given["max_CG_iteration"] == 1:
        pytest.skip("ring_la's conjugate gradients begin at zero, as its own of a sequence do, and one step shows it")
    tokens = {n: given[n][:, None] for n in ("q", "k", "v", "g", "beta")}
    o, (G, S) = _mesa(
        initial_state=given["prev_h_kk"], h_kv_init=given["prev_h_kv"], lam=given["lamb"],
        steps=given["max_CG_iteration"], output_final_state=True, **tokens,
    )  # fmt: skip
    return o[:, 0], G, S


def _ttt(eta: Any, initial_state: Any = None, initial_state_bias: Any = None, **more: Any) -> Any:
    """Its second state is ``[N, H, 1, V]``; sums of gradients, our others, it makes whole before a call ends."""
    if initial_state is not None:
        c = initial_state_bias[..., 0, :]
        initial_state = (initial_state, c, torch.zeros_like(initial_state), torch.zeros_like(c))
    out = ring_la.ttt_linear(eta=eta[..., 0], initial_state=initial_state, **more)
    if out.final_state is None:
        return out
    T, size = eta.shape[1], more.get("mini_batch", 16)
    cu = more.get("cu_seqlens")
    ends = [T] * len(eta) if cu is None else cu.tolist()[1:]
    starts = [0] * len(eta) if cu is None else cu.tolist()[:-1]
    rows = range(len(eta)) if cu is None else [0] * len(ends)
    last = torch.stack([eta[b, e - 1, :, 0] * ((e - s) % size > 0) for b, s, e in zip(rows, starts, ends)]).float()
    W, c, dW, dc = out.final_state
    end = (W - last[..., None, None] * dW, (c - last[..., None] * dc)[..., None, :])
    return out._replace(final_state=end)


def _preconditioned(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        q: Any, k: Any, v: Any, g: Any, h: Any, alpha: Any, beta: Any, center: Any = None, initial_state: Any = None,
        initial_A_state: Any = None, use_qk_l2norm: bool = True, eps: float = 1e-6, solve_tril_precision: Any = None,
        use_gate_in_kernel: bool = False, A_log: Any = None, dt_bias: Any = None, lower_bound: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Its preconditioner is one of each key head. `lower_bound` of a gate that is given is a promise."""
        assert eps == 1e-6
        gate = dict(use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias)
        n, heads = v.shape[2] // k.shape[2], k.shape[2]
        center = torch.full((heads,), -0.2, device=q.device) if center is None else center
        h, alpha, center = h.repeat_interleave(n, 2), alpha.repeat_interleave(n, 2), center.repeat_interleave(n, 0)
        if initial_state is not None:
            A = k.new_zeros(len(initial_state), heads, k.shape[3]) if initial_A_state is None else initial_A_state
            initial_state = (initial_state, A.to(initial_state.dtype).repeat_interleave(n, 1))
        elif initial_A_state is not None:
            pytest.skip("ring_la's has both states or none")
        out = function(
            q, k, v, adapters._gate(g, gate, lower_bound), beta, h, alpha, center,
            initial_state=initial_state, use_qk_l2norm=use_qk_l2norm, **more,
        )  # fmt: skip
        end = out.final_state
        return out if end is None else out._replace(final_state=(end[0], end[1][:, ::n]))

    return call


def _log_linear(initial_state: Any = None, **more: Any) -> Any:
    if initial_state is not None:
        pytest.skip("ring_la's state is another: the levels, not the tokens of a last chunk")
    return ring_la.log_linear_attention(**more)


def _step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of gates of all kinds, that of a head."""

    def call(gk: Any = None, gv: Any = None, **more: Any) -> Any:
        if gk is not None or gv is not None:
            pytest.skip("ring_la's has no gates of channels there")
        return function(**more)

    return call


ATK = {"g_atk": "h", "beta_atk": "alpha", "log_atk_scale": "center", "x": "base"}
STAND_INS = (
    StandIn("hgrn", "chunk_hgrn fused_recurrent_hgrn", ring_la.hgrn),
    StandIn("gla", "chunk_gla fused_recurrent_gla", ring_la.gla, {"gk": "g"}),
    StandIn(
        "simple_gla",
        "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla",
        _simple_gla,
    ),
    StandIn("linear_attn", "chunk_linear_attn fused_chunk_linear_attn fused_recurrent_linear_attn", _linear),
    StandIn(
        "retention",
        "chunk_retention fused_chunk_retention fused_recurrent_retention parallel_retention",
        ring_la.retention,
    ),
    StandIn("lightning_attn", "chunk_lightning_attn fused_recurrent_lightning_attn", ring_la.lightning_attention),
    StandIn("gsa", "chunk_gsa fused_recurrent_gsa", _slots),
    StandIn("comba", "chunk_comba fused_recurrent_comba", _comba),
    StandIn("gdn2", "chunk_gdn2 fused_recurrent_gdn2", _gdn2),
    StandIn("gated_delta_product", "chunk_gated_delta_product", _delta_product),
    StandIn(
        "gated_oja_rule", "chunk_gated_oja_rule fused_recurrent_gated_oja_rule", ring_la.gated_oja_rule, {"gv": "g"}
    ),
    StandIn("forgetting_attn", "parallel_forgetting_attn", ring_la.forgetting_attention),
    StandIn(
        "generalized_delta_rule.dplr",
        "chunk_dplr_delta_rule fused_recurrent_dplr_delta_rule",
        ring_la.dplr_delta_rule,
        {"gk": "g"},
    ),
    StandIn("generalized_delta_rule.iplr", "chunk_iplr_delta_rule fused_recurrent_iplr_delta_rule", _iplr),
    StandIn("rwkv7", "chunk_rwkv7 fused_recurrent_rwkv7", ring_la.rwkv7),
    StandIn("rwkv7.fused_recurrent", "fused_mul_recurrent_rwkv7", _rwkv7_kk),
    StandIn("delta_rule", "chunk_delta_rule fused_recurrent_delta_rule", ring_la.delta_rule),
    StandIn("rwkv6", "chunk_rwkv6 fused_recurrent_rwkv6", ring_la.rwkv6),
    StandIn(
        "mesa_net", "chunk_mesa_net", _mesa,
        {"lamb": "lam", "max_CG_iteration": "steps", "h_kk_init": "initial_state"}, spread=True,
    ),
    StandIn("mesa_net", "mesa_net_decoding_one_step", _mesa_step, as_theirs=True),
    StandIn("ttt", "chunk_ttt_linear fused_chunk_ttt_linear", _ttt, {"chunk_size": "mini_batch"}, spread=True),
    StandIn("log_linear_attn", "chunk_log_linear_attn", _log_linear, {"level_scales": "lam"}),
    StandIn(
        "precond_gated_delta_rule", "chunk_precond_gated_delta_rule fused_recurrent_precond_gated_delta_rule",
        _step(_preconditioned(ring_la.preconditioned_gated_delta_rule)), ATK, spread=True,
    ),
    StandIn(
        "precond_kda", "chunk_precond_kda fused_recurrent_precond_kda", _preconditioned(ring_la.preconditioned_kda),
        ATK, spread=True,
    ),
    StandIn("gated_delta_rule", "chunk_gated_delta_rule", adapters.chunk_gated_delta_rule, as_theirs=True),
    StandIn(
        "gated_delta_rule", "fused_recurrent_gated_delta_rule", _step(adapters.chunk_gated_delta_rule), as_theirs=True
    ),
    StandIn("kda", "chunk_kda fused_recurrent_kda", adapters.chunk_kda, as_theirs=True),
)  # fmt: skip
