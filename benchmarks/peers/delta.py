"""The peers of the production rows of ``ring-la bench ops``: KDA and the gated delta rule, with states.

A peer is a function of our inputs, by name, to its output and final states. What it cannot do it refuses in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ring_la

from ..ops.cases import Case
from ..ops.production import BOUND
from .cudnn import CudnnKDA

Inputs = dict[str, Tensor]
Results = tuple[Tensor, Tensor]
INPUTS = "q", "k", "v", "g", "beta"
KDA, GDN = ("kda_kimi", "kda_slow", "kda_mixed"), ("gdn_qwen",)


@dataclass(frozen=True)
class Peer:
    """A function, and what is to be known of it.

    Attributes:
        values_first: it wants states turned over, ``[N, H, V, K]`` in memory. trains: it has gradients.
        more: of the inputs and the case, the inputs with what it takes in their place.
        by_hand: of inputs and the gradients of what it gives, its forward and backward without autograd, for a graph:
            one that launches from autograd's thread may not be captured.
    """

    function: Callable[[Inputs], Results]
    values_first: bool = False
    trains: bool = True
    more: Callable[[Inputs, Case], Inputs] | None = None
    by_hand: Callable[[Inputs, list[Tensor]], Callable[[], None]] | None = None

    def __call__(self, x: Inputs) -> Results:
        return self.function(x)


def several(x: Inputs) -> Tensor | None:
    """The offsets, where there is more than one sequence."""
    return x["cu_seqlens"] if len(x["cu_seqlens"]) > 2 else None


def states_of(x: Inputs) -> dict[str, Any]:
    return dict(initial_state=x["initial_state"], output_final_state=True)


def unbounded(name: str) -> Peer | None:
    """Ours, without the bound of the gate."""

    def call(x: Inputs) -> Results:
        o, S = ring_la.kda(*(x[n] for n in INPUTS), cu_seqlens=several(x), **states_of(x))
        return o, S

    return Peer(call) if name in KDA else None


def chunks(name: str) -> Peer | None:
    """Ours, which trains by chunks of 64 tokens, however much there is to do. Sets that for its whole process."""

    def call(x: Inputs) -> Results:
        from ring_la.kernels.wy import one_launch

        one_launch.LEAST = 2**60
        arguments = (x[n] for n in INPUTS)
        o, S = ring_la.gated_delta_rule(*arguments, cu_seqlens=several(x), **states_of(x))
        return o, S

    return Peer(call) if name in GDN else None


def fla(name: str) -> Peer | None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    def call(x: Inputs) -> Results:
        cu = several(x)
        arguments, more = [x[n] for n in INPUTS], states_of(x)
        more["cu_seqlens"] = None if cu is None else cu.long()
        if name in KDA:
            return chunk_kda(*arguments, safe_gate=True, **more)  # gates are of at least BOUND, as it wants them
        return chunk_gated_delta_rule(*arguments, **more)

    return Peer(call) if name in KDA + GDN else None


def flash_qla(name: str) -> Peer | None:
    """Qwen's."""
    from flash_qla import chunk_gated_delta_rule

    def call(x: Inputs) -> Results:
        arguments = (x[n] for n in INPUTS)
        scale = x["q"].shape[-1] ** -0.5
        return chunk_gated_delta_rule(*arguments, scale=scale, cu_seqlens=x["cu_seqlens"], **states_of(x))

    return Peer(call) if name in GDN else None


def attn_gym(name: str) -> Peer | None:
    """Meta's; its states are ``[N, H, V, K]``."""
    from attn_gym.linear import chunk_gdn, chunk_kda

    def call(x: Inputs) -> Results:
        function = chunk_kda if name in KDA else chunk_gdn
        arguments = [x[n] for n in INPUTS]
        o, S = function(
            *arguments, x["initial_state"].mT, cu_seqlens=x["cu_seqlens"] if several(x) is not None else None,
            output_final_state=True,
        )  # fmt: skip
        return o, S.mT

    return Peer(call, values_first=True) if name in KDA + GDN else None


def cudnn(name: str) -> Peer | None:
    """NVIDIA's KDA on Hopper."""
    import importlib

    importlib.import_module("cudnn.linear_attention.hopper.cuda_bwd_host")

    def call(x: Inputs) -> Results:
        o, S = _Cudnn.apply(*(x[n] for n in (*INPUTS, "initial_state", "cu_seqlens")))
        return o, S

    def by_hand(x: Inputs, grads: list[Tensor]) -> Callable[[], None]:
        (do, dS), x = grads, {n: t.detach() for n, t in x.items()}
        return CudnnKDA(*(x[n] for n in INPUTS), x["initial_state"], do, dS, x["cu_seqlens"]).both()

    return Peer(call, values_first=True, by_hand=by_hand) if name in KDA else None


class _Cudnn(torch.autograd.Function):
    """Their launchers, with states as they lie in memory there."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, S0, cu_seqlens):
        made = CudnnKDA(q, k, v, g, beta, S0, v, S0, cu_seqlens)
        made.forward()
        ctx.made = made
        return made.o, made.final_state

    @staticmethod
    def backward(ctx, do, dS):
        made = ctx.made
        again = CudnnKDA(made.q, made.k, made.v, made.g, made.beta, made.S0, do.contiguous(), dS, made.cu_seqlens)
        again.backward()
        return *again.gradients, None


def flash_kda(name: str) -> Peer | None:
    """Moonshot's: forward only, with Kimi's gate, the sigmoid of β and unit lengths inside."""
    import flash_kda

    def call(x: Inputs) -> Results:
        if "raw" not in x:
            raise ValueError("its gate is made inside, −5 sigmoid(…): no other")
        o, S0 = torch.empty_like(x["v"]), x["initial_state"].mT
        S = torch.empty_like(S0)
        flash_kda.fwd(
            x["q"], x["k"], x["v"], x["raw"], x["raw_beta"], x["q"].shape[-1] ** -0.5, o, x["zeros"], x["zero_bias"],
            BOUND, initial_state=S0, final_state=S, cu_seqlens=x["offsets"] if several(x) is not None else None,
        )  # fmt: skip
        return o, S.mT

    return Peer(call, values_first=True, trains=False, more=raw) if name in KDA else None


def raw(x: Inputs, case: Case) -> Inputs:
    """With what `flash_kda` makes these gates and β of, where a sigmoid does."""
    if case.gates != "kimi":
        return x
    H, K = x["g"].shape[2:]
    zeros = torch.zeros(H, K, device=x["g"].device)
    given = {"raw": torch.logit(x["g"].detach() / BOUND), "raw_beta": torch.logit(x["beta"].detach())}
    more = {"zeros": zeros[:, 0].contiguous(), "zero_bias": zeros, "offsets": x["cu_seqlens"].long()}
    return x | {n: t.bfloat16() for n, t in given.items()} | more


PEERS: dict[str, Callable[[str], Peer | None]] = {
    "unbounded": unbounded,
    "chunks": chunks,
    "fla": fla,
    "flash_qla": flash_qla,
    "cudnn": cudnn,
    "flash_kda": flash_kda,
    "attn_gym": attn_gym,
}
PACKAGES = {
    "flash_qla": "flash-qla", "cudnn": "nvidia-cudnn-frontend", "flash_kda": "flash-kda", "attn_gym": "attn-gym",
}  # fmt: skip
