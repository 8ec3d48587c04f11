"""The peers of ``ring-la bench ops``, by operator: functions of our inputs, by name; what is not installed says so.

FLA and the Mamba kernels return tuples or tensors: a peer here returns the output tensor, whose graph the backward
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..ops.cases import KEYWORDS, Inputs, Results
from . import delta

GUARD = "FLA's guard against the gated backward on this Triton (its issue #640) is switched off"
GUARDED = (
    "simple_gla", "mamba2", "gated_delta_rule", "comba", "gated_delta_product", "preconditioned_gated_delta_rule",
)  # fmt: skip
"""Operators whose backward FLA refuses on Hopper with Triton 3.4 to 3.7.0; how wrong it is shows in the errors."""


def fla(name: str) -> Callable[[Inputs], Tensor] | None:
    """fla-core's function, or None if it has none. Raises ImportError where it is not installed."""
    import fla.ops.common.chunk_o as chunk_o
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.comba import chunk_comba
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.forgetting_attn import parallel_forgetting_attn
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.gsa import chunk_gsa
    from fla.ops.hgrn import chunk_hgrn
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.lightning_attn import chunk_lightning_attn
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.precond_gated_delta_rule import chunk_precond_gated_delta_rule
    from fla.ops.precond_kda import chunk_precond_kda
    from fla.ops.retention import chunk_retention
    from fla.ops.rwkv6 import chunk_rwkv6
    from fla.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    if name in GUARDED:
        chunk_o.TRITON_ABOVE_3_7_1 = True

    def step(function: Callable, gate: str = "g", **more: float) -> Callable[[Inputs], Tensor]:
        def call(x: Inputs) -> Tensor:
            named = {{"state": "initial_state", "g": gate}.get(n, n): t for n, t in x.items()}
            return function(**named, output_final_state=True, **more)[0]

        return call

    def mamba2(x: Inputs) -> Tensor:
        """Mamba-2 as simple GLA; the heads of a group get their own B and C."""
        delta = softplus(x["dt"].float() + x["dt_bias"])
        repeat = x["x"].shape[2] // x["B"].shape[2]
        q, k = (x[n].repeat_interleave(repeat, 2) for n in ("C", "B"))
        return chunk_simple_gla(q, k, (x["x"] * delta[..., None]).to(q.dtype), delta * x["A"], scale=1.0)[0]

    def preconditioned(function: Callable, **more: bool) -> Callable[[Inputs], Tensor]:
        names = {"h": "g_atk", "alpha": "beta_atk", "center": "log_atk_scale"}

        def call(x: Inputs) -> Tensor:
            return function(**{names.get(n, n): t for n, t in x.items()}, **more)[0]

        return call

    def delta_product(x: Inputs) -> Tensor:
        steps = {n: x[n].flatten(1, 2) for n in ("k", "v", "beta")}
        return chunk_gated_delta_product(x["q"], g=x["g"], num_householder=x["k"].shape[2], **steps)[0]

    def oja(x: Inputs) -> Tensor:
        from fla.ops.gated_oja_rule import chunk_gated_oja_rule  # not in every release

        return chunk_gated_oja_rule(**{"gv" if n == "g" else n: t for n, t in x.items()})[0]

    def ttt(x: Inputs) -> Tensor:
        from fla.ops.ttt import chunk_ttt_linear

        norm = {n: x[n].to(x["q"].dtype) for n in ("w", "b")}
        return chunk_ttt_linear(**x | norm | {"eta": x["eta"][..., None]}, chunk_size=16)[0]

    def log_linear(x: Inputs) -> Tensor:
        from fla.ops.log_linear_attn import chunk_log_linear_attn

        return chunk_log_linear_attn(x["q"], x["k"], x["v"], x["g"], x["lam"].to(x["q"].dtype), scale=1.0)[0]

    def momentum(x: Inputs) -> Tensor:
        from fla.ops.momentum_delta_rule import chunk_momentum_delta_rule

        named = {{"g": "log_alpha", "mu": "log_mu"}.get(n, n): t for n, t in x.items()}
        plain = dict(use_qk_l2norm_in_kernel=False, use_p_times_alpha=False)
        return chunk_momentum_delta_rule(**named, **plain)[0]

    def mesa(x: Inputs) -> Tensor:
        from fla.ops.mesa_net import chunk_mesa_net

        x = dict(x, lamb=x["lam"], q=x["q"] * x["q"].shape[-1] ** -0.5)  # it has no scale
        return chunk_mesa_net(**{n: t for n, t in x.items() if n != "lam"})[0]

    def shared(x: Inputs) -> Tensor:
        if "s" in x:
            from fla.ops.abc import chunk_abc

            return chunk_abc(**x)[0]
        from fla.ops.lightnet import chunk_lightnet

        return chunk_lightnet(**x)[0]

    return {
        "momentum_delta_rule": momentum,
        "lightnet": shared,
        "mesa_net": mesa,
        "abc_attention": shared,
        "linear_attention": lambda x: chunk_linear_attn(**x, normalize=False)[0],
        "retention": lambda x: chunk_retention(**x)[0],
        "lightning": lambda x: chunk_lightning_attn(**x, layer_idx=0, num_layers=1)[0],
        "simple_gla": lambda x: chunk_simple_gla(**x)[0],
        "mamba2": mamba2,
        "gla": lambda x: chunk_gla(**x)[0],
        "delta_rule": lambda x: chunk_delta_rule(**x)[0],
        "gated_delta_rule": lambda x: chunk_gated_delta_rule(**x)[0],
        "kda": lambda x: chunk_kda(**x)[0],
        "rwkv7": lambda x: chunk_rwkv7(**x, **dict(KEYWORDS["rwkv7"]))[0],
        "dplr": lambda x: chunk_dplr_delta_rule(x["q"], x["k"], x["v"], x["a"], x["b"], x["g"])[0],
        "comba": lambda x: chunk_comba(**x)[0],
        "gdn2": lambda x: chunk_gdn2(**x)[0],
        "gated_delta_product": delta_product,
        "preconditioned_gated_delta_rule": preconditioned(
            chunk_precond_gated_delta_rule, use_qk_l2norm_in_kernel=False
        ),
        "preconditioned_kda": preconditioned(chunk_precond_kda),
        "rwkv6": lambda x: chunk_rwkv6(**x)[0],
        "gated_slot_attention": lambda x: chunk_gsa(**x)[0],
        "hgrn": lambda x: chunk_hgrn(**x)[0],
        "ttt_linear": ttt,
        "gated_oja_rule": oja,
        "log_linear_attention": log_linear,
        "forgetting_attention": lambda x: parallel_forgetting_attn(**x),
        "short_conv": lambda x: causal_conv1d(x["x"], x["weight"], activation="silu")[0],
        "step_simple_gla": step(fused_recurrent_simple_gla),
        "step_gla": step(fused_recurrent_gla, "gk"),
        "step_gated_delta_rule": step(fused_recurrent_gated_delta_rule),
        "step_kda": step(fused_recurrent_kda),
        "step_rwkv7": step(fused_recurrent_rwkv7, scale=1.0),
    }.get(name)


def mamba_ssm(name: str) -> Callable[[Inputs], Tensor] | None:
    """Mamba-2's own kernels."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(x: Inputs) -> Tensor:
        keywords = dict(dt_bias=x["dt_bias"], dt_softplus=True)
        return mamba_chunk_scan_combined(x["x"], x["dt"], x["A"], x["B"], x["C"], 256, **keywords)

    return call if name == "mamba2" else None


def causal_conv1d(name: str) -> Callable[[Inputs], Tensor] | None:
    """The convolution most Mamba-like models run on."""
    from causal_conv1d import causal_conv1d_fn

    def call(x: Inputs) -> Tensor:
        return causal_conv1d_fn(x["x"].mT, x["weight"], activation="silu").mT

    return call if name == "short_conv" else None


def matmul(name: str) -> Callable[[Inputs], Tensor] | None:
    """Two of PyTorch's matrix products, for the form without a direction."""

    def call(x: Inputs) -> Tensor:
        q, k, v = (x[n].transpose(1, 2) for n in ("q", "k", "v"))
        return ((q * q.shape[-1] ** -0.5) @ (k.mT @ v)).transpose(1, 2)

    return call if name == "bidirectional" else None


PEERS: dict[str, Callable[[str], Callable[[Inputs], Results] | None]] = {
    "fla": fla,
    "mamba_ssm": mamba_ssm,
    "causal_conv1d": causal_conv1d,
    "torch": matmul,
}
PACKAGES = {"fla": "fla-core", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "torch": "torch"}
RIVALS = tuple(dict.fromkeys((*PEERS, *delta.PEERS)))
"""The names of all peers."""


def loaders(name: str) -> dict[str, Callable[[str], Callable[[Inputs], Results] | None]]:
    """What gives an operator's peers: those of production rows are their own."""
    return delta.PEERS if name in delta.KDA + delta.GDN else PEERS


def peers_of(name: str, device: str, among: Collection[str] = RIVALS) -> tuple[list[str], dict[str, str]]:
    """Names of the peers an operator has here, and why the others that would have it are absent."""
    found, absent = [], {}
    for peer, load in loaders(name).items():
        if peer not in among:
            continue
        if peer != "torch" and device != "cuda":
            absent[peer] = "needs a GPU"
            continue
        try:
            if load(name) is not None:
                found.append(peer)
        except Exception as e:  # a peer that cannot be imported here, for whatever reason of its own
            absent[peer] = f"{type(e).__name__}: {e}".splitlines()[0]
    return found, absent


def load(side: str, name: str) -> Callable[[Inputs], Results]:
    """The function of a side that `peers_of` found."""
    function = loaders(name)[side](name)
    assert function is not None
    return function


def versions() -> dict[str, str]:
    """Installed versions of the peers."""
    from importlib.metadata import PackageNotFoundError, version

    out = {"torch": torch.__version__}
    for package in (*PACKAGES.values(), *delta.PACKAGES.values(), "triton"):
        try:
            out.setdefault(package, version(package))
        except PackageNotFoundError:
            out[package] = "absent"
    return out
