"""What is measured: each operator with its inputs at a shape, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ring_la
from ring_la.define import Argument, Definition
from ring_la.recurrences import RECURRENCES

from . import production

DEFINITIONS = {r.name: r for r in RECURRENCES}
SLOTS = 64
"""Slots of gated slot attention."""
GROUPS = 8
"""Groups of Mamba-2's B and C, where they divide the heads."""
SHARED_INPUTS = ("dA", "ddt_bias", "dweight", "du", "dcenter")
"""Gradients of what all tokens share."""
Inputs = dict[str, Tensor]
Results = Tensor | tuple[Tensor, ...]
Draw = Callable[..., Tensor]


class Shape(NamedTuple):
    """``BxTxHxK`` or ``BxTxHxKxV``: batch, tokens, heads, and the two head sizes; H may be ``HK:H``, with key heads of
    their own, and BxT ``T+T``, the lengths of packed sequences (B the number, T the longest)."""

    B: int
    T: int
    H: int
    K: int
    V: int
    HK: int = 0
    apart: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Shape:
        words = text.split("x")
        apart = tuple(int(n) for n in words[0].split("+")) if "+" in words[0] else ()
        sizes = [*((len(apart), max(apart)) if apart else ()), *words[1 if apart else 0 :]]
        if len(sizes) not in (4, 5):
            raise ValueError(text)
        keys, _, heads = str(sizes[2]).rpartition(":")
        HK, sizes = int(keys or 0), [int(n) for n in (*sizes[:2], heads, *sizes[3:])]
        if min(*sizes, *apart, HK if keys else 1) < 1 or (HK and sizes[2] % HK):
            raise ValueError(text)
        return cls(*sizes[:4], sizes[-1], HK, apart)

    def __str__(self) -> str:
        size = [self.K] if self.V == self.K else [self.K, self.V]
        lengths = ["+".join(map(str, self.apart))] if self.apart else [self.B, self.T]
        return "x".join(map(str, [*lengths, self.heads, *size]))

    @property
    def heads(self) -> str:
        return f"{self.HK}:{self.H}" if self.HK else str(self.H)

    @property
    def keys(self) -> int:
        """Heads of keys."""
        return self.HK or self.H

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.apart or (self.T,) * self.B

    def short(self, tokens: int) -> Shape:
        """One sequence of at most so many tokens."""
        return self._replace(B=1, T=min(self.T, tokens), apart=())


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: that of the public function.
        keywords: further arguments, of ours and of the reference alike.
        step: one token from a state, overwritten in place, without gradients.
        gates: those of `production.GATES`; its sequences are packed, with states, and it gives the final ones, too.
    """

    name: str
    keywords: tuple[tuple[str, object], ...] = ()
    step: bool = False
    gates: str = ""

    @property
    def definition(self) -> Definition | None:
        """The recurrence it is; None for what is none."""
        return DEFINITIONS.get(self.name)

    @property
    def flags(self) -> dict[str, object]:
        return {} if self.definition is None else dict(self.definition.flags)

    def ours(self, x: Inputs) -> Results:
        """The output, by the default kernels; with production gates also the final states."""
        x, more = dict(x), self.flags | dict(self.keywords)
        if self.gates:
            return self._packed(x, more)
        if self.step:
            more |= {"initial_state": x.pop("state"), "mode": "recurrent", "in_place": True}
        return getattr(ring_la, self.name)(**x, **more).o

    def _packed(self, x: Inputs, more: dict[str, object]) -> Results:
        if len(x["cu_seqlens"]) == 2:
            x.pop("cu_seqlens")
        out = getattr(ring_la, self.name)(**x, **more, output_final_state=True)
        return out.o, out.final_state

    def truth(self, x: Inputs) -> Results:
        """The output by the PyTorch kernels, which the suite holds to 1e-9 of the token loop in fp64."""
        x, more = dict(x), self.flags | dict(self.keywords)
        if self.name != "short_conv":
            more["backend"] = "reference" if self.name == "forgetting_attention" else "torch"
        if self.gates:
            return self._packed(x, more)
        if self.step:
            more |= {"initial_state": x.pop("state"), "mode": "recurrent"}
        return getattr(ring_la, self.name)(**x, **more).o


NAMES = {"lightning_attention": "lightning", "dplr_delta_rule": "dplr"}
"""Recurrences that tables call by another name."""
KEYWORDS = {"rwkv7": (("scale", 1.0), ("lower_bound", -0.61)), "ttt_linear": (("mini_batch", 16),)}
"""Arguments that a peer has no choice of, and what is known of a gate."""
BOUNDED = ("rwkv7", "dplr_delta_rule")
"""Recurrences whose log-decays are above -0.6, as RWKV-7's are."""
STEPS = ("simple_gla", "gla", "gated_delta_rule", "kda", "rwkv7")
"""Recurrences measured a token at a time as well."""
CASES: dict[str, Case] = (
    {NAMES.get(n, n): Case(n, KEYWORDS.get(n, ())) for n in DEFINITIONS}
    | {
        "bidirectional": Case("linear_attention", (("causal", False),)),
        "short_conv": Case("short_conv", (("activation", "silu"),)),
        "forgetting_attention": Case("forgetting_attention"),
        "log_linear_attention": Case("log_linear_attention", (("scale", 1.0),)),
    }
    | {f"kda_{gates}": Case("kda", (("lower_bound", production.BOUND),), gates=gates) for gates in production.KDA}
    | {"gdn_qwen": Case("gated_delta_rule", gates="qwen")}
    | {f"step_{n}": Case(n, KEYWORDS.get(n, ()), step=True) for n in STEPS}
)
"""Operators by the name they have in tables; ``step_…`` is one token of decoding."""


def inputs(case: Case, shape: Shape, device: str, seed: int = 1) -> Inputs:
    """Arguments by name: q and k of unit length, gates logsigmoid(x + 3), rates sigmoid(x), x normal; bf16 on a GPU
    (fp32 on a CPU) but for a gate a head, a state, and what all tokens share, which are fp32."""
    if case.gates:
        return production.inputs(case.gates, shape, device, seed)
    B, T, H, K, V, *_ = shape
    generator = torch.Generator(device).manual_seed(seed)
    narrow = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    if case.name in ("forgetting_attention", "log_linear_attention"):
        x = {n: normal(B, T, H, D).to(narrow) for n, D in (("q", K), ("k", K), ("v", V))}
        x["g"] = logsigmoid(normal(B, T, H) + 3)
        if case.name == "log_linear_attention":
            x |= {n: normalize(x[n], dim=-1) for n in ("q", "k")}
            x["lam"] = normal(B, T, H, (T - 1).bit_length() + 1).sigmoid()
        return _leaves(x, True)
    if case.definition is None:
        D = H * (2 * K + V)
        return _leaves({"x": normal(B, T, D).to(narrow), "weight": normal(D, 4).to(narrow)}, True)
    if case.name == "mamba2":
        groups = GROUPS if H % GROUPS == 0 else 1
        unit = lambda: normalize(normal(B, T, groups, K), dim=-1)  # noqa: E731
        x = {"x": normal(B, T, H, V), "dt": normal(B, T, H) - 3, "B": unit(), "C": unit()}
        decay = {"A": -torch.linspace(1, 16, H, device=device), "dt_bias": 0.1 * normal(H)}
        return _leaves({n: t.to(narrow) for n, t in x.items()} | decay, True)
    sizes = {"B": B, "T": T, "G": H, "H": H, "K": K, "V": V, "D": H * K, "R": K // 2, "M": min(K, SLOTS), "N": 2}
    x: Inputs = {}
    for name, argument in case.definition.arguments.items():
        if argument.shared and argument.kind == "log decay":
            continue  # the paper's own
        drawn = _draw(case, argument, tuple(sizes[letter] for letter in argument.shape), normal, x)
        exact = argument.shared or (argument.kind == "log decay" and argument.shape == "BTH")
        x[name] = drawn if exact else drawn.to(narrow)
    if case.step:
        x["state"] = normal(B, H, K, V)
    return _leaves(x, not case.step)


def _draw(case: Case, argument: Argument, shape: tuple[int, ...], normal: Draw, drawn: Inputs) -> Tensor:
    """An example of an argument."""
    if callable(argument.kind):
        return argument.kind(normal, drawn, shape)
    x = normal(*shape)
    if argument.kind == "log decay":
        return -0.6 * x.sigmoid() if case.name in BOUNDED else logsigmoid(x + 3)
    if argument.kind in ("query", "key", "unit", "unit value"):
        return normalize(x, dim=-1)
    return x.sigmoid() if argument.kind == "rate" else x


def _leaves(x: Inputs, wanting: bool) -> Inputs:
    return {n: t.detach().requires_grad_(wanting) for n, t in x.items()}


def tensors(out: Results) -> tuple[Tensor, ...]:
    """What a side gives, the output first."""
    return out if isinstance(out, tuple) else (out,)


def floor_bytes(case: Case, x: Inputs, out: Results) -> int:
    """Bytes that forward and backward must move: inputs and the output once each; inputs, the output's gradient and
    the inputs' gradients once each. For a step: inputs and the output once, the state twice."""
    held = sum(t.numel() * t.element_size() for t in x.values())
    o = sum(t.numel() * t.element_size() for t in tensors(out))
    return held + o + x["state"].numel() * 4 if case.step else 3 * held + 2 * o
