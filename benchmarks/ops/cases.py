"""What is measured: each operator with its inputs at a shape, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ring_la

GROUPS = 8
"""Groups of Mamba-2's B and C, where they divide the heads."""
SHARED_INPUTS = ("dA", "ddt_bias", "dweight")
"""Gradients of what all tokens share."""
Inputs = dict[str, Tensor]
Draw = Callable[..., Tensor]


class Shape(NamedTuple):
    """``BxTxHxK`` or ``BxTxHxKxV``: batch, tokens, heads, and the two head sizes."""

    B: int
    T: int
    H: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes = [int(n) for n in text.split("x")]
        if len(sizes) not in (4, 5) or min(sizes) < 1:
            raise ValueError(text)
        return cls(*sizes[:4], sizes[-1])

    def __str__(self) -> str:
        return "x".join(map(str, self if self.V != self.K else self[:4]))


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: that of the public function.
        extra: inputs beside q, k and v, by kind (see `inputs`).
        keywords: further arguments, of ours and of the reference alike.
        step: one token from a state, overwritten in place, without gradients.
    """

    name: str
    extra: tuple[str, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()
    step: bool = False

    def ours(self, x: Inputs) -> Tensor:
        """The output, by the default kernels."""
        x, more = dict(x), dict(self.keywords)
        if self.step:
            more |= {"initial_state": x.pop("state"), "mode": "recurrent", "in_place": True}
        return getattr(ring_la, self.name)(**x, **more).o

    def truth(self, x: Inputs) -> Tensor:
        """The output by the PyTorch kernels, which the suite holds to 1e-9 of the token loop in fp64."""
        x, more = dict(x), dict(self.keywords)
        if self.name != "short_conv":
            more["backend"] = "torch"
        if self.step:
            more |= {"initial_state": x.pop("state"), "mode": "recurrent"}
        return getattr(ring_la, self.name)(**x, **more).o


CASES: dict[str, Case] = {
    "linear_attention": Case("linear_attention"),
    "bidirectional": Case("linear_attention", keywords=(("causal", False),)),
    "retention": Case("retention"),
    "lightning": Case("lightning_attention"),
    "simple_gla": Case("simple_gla", ("g",)),
    "mamba2": Case("mamba2", ("mamba2",), (("dt_softplus", True),)),
    "gla": Case("gla", ("gk",)),
    "delta_rule": Case("delta_rule", ("beta",)),
    "gated_delta_rule": Case("gated_delta_rule", ("g", "beta")),
    "kda": Case("kda", ("gk", "beta")),
    "rwkv7": Case("rwkv7", ("rwkv7",), (("scale", 1.0),)),
    "dplr": Case("dplr_delta_rule", ("dplr",)),
    "short_conv": Case("short_conv", ("conv",), (("activation", "silu"),)),
    "step_simple_gla": Case("simple_gla", ("g", "state"), step=True),
    "step_gla": Case("gla", ("gk", "state"), step=True),
    "step_gated_delta_rule": Case("gated_delta_rule", ("g", "beta", "state"), step=True),
    "step_kda": Case("kda", ("gk", "beta", "state"), step=True),
    "step_rwkv7": Case("rwkv7", ("rwkv7", "state"), (("scale", 1.0),), step=True),
}
"""Operators by the name they have in tables; ``step_…`` is one token of decoding."""


def inputs(case: Case, shape: Shape, device: str, seed: int = 1) -> Inputs:
    """Arguments by name: q and k of unit length, gates logsigmoid(x + 3), β sigmoid(x), x normal; bf16 on a GPU (fp32
    on a CPU) but for a gate a head, a state, and Mamba-2's parameters, which are fp32."""
    B, T, H, K, V = shape
    generator = torch.Generator(device).manual_seed(seed)
    narrow = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    def unit(heads: int) -> Tensor:
        return normalize(normal(B, T, heads, K), dim=-1)

    if case.extra == ("conv",):
        D = H * (2 * K + V)
        return _leaves({"x": normal(B, T, D).to(narrow), "weight": normal(D, 4).to(narrow)}, True)
    if case.extra == ("mamba2",):
        groups = GROUPS if H % GROUPS == 0 else 1
        x = {"x": normal(B, T, H, V), "dt": normal(B, T, H) - 3, "B": unit(groups), "C": unit(groups)}
        decay = {"A": -torch.linspace(1, 16, H, device=device), "dt_bias": 0.1 * normal(H)}
        return _leaves({n: t.to(narrow) for n, t in x.items()} | decay, True)
    x = {"q": unit(H).to(narrow), "k": unit(H).to(narrow), "v": normal(B, T, H, V).to(narrow)}
    for kind in case.extra:
        if kind == "g":
            x["g"] = logsigmoid(normal(B, T, H) + 3)
        elif kind == "gk":
            x["g"] = logsigmoid(normal(B, T, H, K) + 3).to(narrow)
        elif kind == "beta":
            x["beta"] = torch.sigmoid(normal(B, T, H)).to(narrow)
        elif kind == "state":
            x["state"] = normal(B, H, K, V)
        else:  # RWKV-7 and DPLR: one is the other under other names
            a = unit(H)
            b = (-a * torch.sigmoid(normal(B, T, H, 1))).to(narrow)
            w = (-0.6 * torch.sigmoid(normal(B, T, H, K))).to(narrow)
            x |= {"a": a.to(narrow), "b": b, "g": w}
            if kind == "rwkv7":
                x["r"], x["w"] = x.pop("q"), x.pop("g")
    return _leaves(x, not case.step)


def _leaves(x: Inputs, wanting: bool) -> Inputs:
    return {n: t.detach().requires_grad_(wanting) for n, t in x.items()}


def floor_bytes(case: Case, x: Inputs, out: Tensor) -> int:
    """Bytes that forward and backward must move: inputs and the output once each; inputs, the output's gradient and
    the inputs' gradients once each. For a step: inputs and the output once, the state twice."""
    held = sum(t.numel() * t.element_size() for t in x.values())
    o = out.numel() * out.element_size()
    return held + o + x["state"].numel() * 4 if case.step else 3 * held + 2 * o
