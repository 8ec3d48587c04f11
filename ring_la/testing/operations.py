"""What can be judged: each operation's inputs, which of them ranks share, and its fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..errors import ArgumentError

TAPS = 4
"""Width of the short convolution that is judged."""


class Shapes(NamedTuple):
    """Sizes of a case: rows, tokens of the whole sequence, value heads, key heads, channels."""

    B: int
    T: int
    H: int
    Hk: int
    K: int
    V: int


Draw = Callable[..., Tensor]
"""``draw(*shape)``: normal fp64 numbers."""


@dataclass(frozen=True)
class Operation:
    """An operation that a split implementation claims to compute.

    Attributes:
        name: of the function in `ring_la.reference`.
        inputs: draws its tensors by name, fp64, the whole sequence's: ``inputs(shapes, draw, hard)``.
        shared: names of inputs without a token dimension; all others are ``[B, T, …]``.
        state: shape of one document's state; None: it has none.
        gates: names of inputs that are log-decays.
    """

    name: str
    inputs: Callable[[Shapes, Draw, bool], dict[str, Tensor]]
    shared: tuple[str, ...] = ()
    state: Callable[[Shapes], tuple[int, ...]] | None = None
    gates: tuple[str, ...] = ()

    @property
    def reference(self) -> Callable:
        """The fp64 loop of that name."""
        return getattr(reference, self.name)


def find(name: str) -> Operation:
    """The operation of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in OPERATIONS:
        raise ArgumentError("operation", f"one of {', '.join(OPERATIONS)}", repr(name))
    return OPERATIONS[name]


def _uniform(draw: Draw, *shape: int) -> Tensor:
    return torch.special.ndtr(draw(*shape))


def _gates(draw: Draw, shape: tuple[int, ...], hard: bool) -> Tensor:
    """Log-decays that differ per head and per token, from nearly none to strong forgetting; `hard`: also heads that
    keep everything, and tokens after which nothing is left."""
    strength = torch.logspace(-2.5, 0, shape[2], dtype=torch.float64)
    g = -strength.view(-1, *[1] * (len(shape) - 3)) * _uniform(draw, *shape)
    if not hard:
        return g
    chosen = draw(*shape[:3]).view(*shape[:3], *[1] * (len(shape) - 3))
    g = torch.where(chosen > 1.2, -40.0, g)
    return torch.where(chosen < -1.2, 0.0, g)


def _qkv(s: Shapes, draw: Draw) -> dict[str, Tensor]:
    k = F.normalize(draw(s.B, s.T, s.Hk, s.K), dim=-1)
    return {"q": draw(s.B, s.T, s.Hk, s.K), "k": k, "v": draw(s.B, s.T, s.H, s.V)}


def _gated(diagonal: bool, beta: bool) -> Callable[[Shapes, Draw, bool], dict[str, Tensor]]:
    def inputs(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
        gate = (s.B, s.T, s.H, s.K) if diagonal else (s.B, s.T, s.H)
        out = _qkv(s, draw) | {"g": _gates(draw, gate, hard)}
        return out | ({"beta": _uniform(draw, s.B, s.T, s.H)} if beta else {})

    return inputs


def _static(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    rates = -torch.logspace(-2.5, 1.6 if hard else -0.3, s.H, dtype=torch.float64)
    return _qkv(s, draw) | {"g": rates}


def _delta(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    return _qkv(s, draw) | {"beta": _uniform(draw, s.B, s.T, s.H)}


def _mamba2(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    top = 1.6 if hard else 0.0
    return {
        "x": draw(s.B, s.T, s.H, s.V),
        "dt": _uniform(draw, s.B, s.T, s.H),
        "A": -torch.logspace(-2, top, s.H, dtype=torch.float64),
        "B": draw(s.B, s.T, s.Hk, s.K),
        "C": draw(s.B, s.T, s.Hk, s.K),
        "D": draw(s.H),
    }


def _dplr(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    a = -F.normalize(draw(s.B, s.T, s.H, s.K), dim=-1)
    b = -a * _uniform(draw, s.B, s.T, s.H, s.K)
    return _qkv(s, draw) | {"a": a, "b": b, "g": _gates(draw, (s.B, s.T, s.H, s.K), hard)}


def _rwkv7(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    x = _dplr(s, draw, hard)
    return {"r": x["q"], "w": x["g"], "k": x["k"], "v": x["v"], "a": x["a"], "b": x["b"]}


def _attention(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    q, k = draw(s.B, s.T, s.H, s.K), draw(s.B, s.T, s.Hk, s.K)
    return {"q": q * (4.0 if hard else 1.0), "k": k, "v": draw(s.B, s.T, s.Hk, s.V)}


def _conv(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    return {"x": draw(s.B, s.T, s.H * s.V), "weight": draw(s.H * s.V, TAPS)}


def _shift(s: Shapes, draw: Draw, hard: bool) -> dict[str, Tensor]:
    return {"x": draw(s.B, s.T, s.H * s.V)}


def _matrix(s: Shapes) -> tuple[int, ...]:
    return (s.H, s.K, s.V)


OPERATIONS = {
    o.name: o
    for o in (
        Operation("linear_attention", lambda s, draw, hard: _qkv(s, draw), state=_matrix),
        Operation("lightning_attention", _static, ("g",), _matrix, ("g",)),
        Operation("simple_gla", _gated(False, False), (), _matrix, ("g",)),
        Operation("mamba2", _mamba2, ("A", "D"), _matrix),
        Operation("gla", _gated(True, False), (), _matrix, ("g",)),
        Operation("delta_rule", _delta, (), _matrix),
        Operation("gated_delta_rule", _gated(False, True), (), _matrix, ("g",)),
        Operation("kda", _gated(True, True), (), _matrix, ("g",)),
        Operation("dplr_delta_rule", _dplr, (), _matrix, ("g",)),
        Operation("rwkv7", _rwkv7, (), _matrix, ("w",)),
        Operation("short_conv", _conv, ("weight",), lambda s: (s.H * s.V, TAPS - 1)),
        Operation("token_shift", _shift, (), lambda s: (s.H * s.V,)),
        Operation("attention", _attention),
    )
}
"""All operations by name."""
