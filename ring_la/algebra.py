"""The affine algebra every layer along the sequence lives in.

A linear recurrence over any run of tokens is an affine map of its state,

    S_out = A · S_in + b,        S, b : [..., H, K, V],

and runs compose: ``(A2, b2) ∘ (A1, b1) = (A2·A1, A2·b1 + b2)``. The transition ``A`` closes under four
shapes, and the backward pass is the same scan, right to left, with ``Aᵀ``:

    identity   no tensor          linear attention
    scalar     [..., H]           retention, lightning attention, simple GLA, Mamba-2
    diagonal   [..., H, K]        GLA, HGRN-2
    dense      [..., H, K, K]     delta rule, gated delta rule, KDA, Comba, GDN-2, RWKV-7 / DPLR

`Rule` is how one token changes the state; the shape of its transition follows from it. What a token reads does not: to
read the other side of the state, ``o = S q``, needs no scan of its own, since that is a gradient of ``cᵀ S q``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .errors import ArgumentError

Transition = Literal["identity", "scalar", "diagonal", "dense"]
Write = Literal["additive", "sum", "delta", "erase", "dplr"]
Decay = Literal["none", "scalar", "diagonal"]
Side = Literal["keys", "values"]
_GATE: dict[Decay, tuple[str, ...]] = {"none": (), "scalar": ("g",), "diagonal": ("g",)}
_BROUGHT: dict[Write, tuple[str, ...]] = {
    "additive": (), "sum": (), "delta": ("beta",), "erase": ("beta", "a"), "dplr": ("a", "b"),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """How one token changes the state ``S [K, V]``, given ``D = diag(exp g)`` (g per head or per key channel).

    additive   S ← D S + k vᵀ
    sum        S ← D S + v                              (heads of one number; q and k are not read)
    delta      S ← (I − β k kᵀ) D S + β k vᵀ
    erase      S ← (I − β k aᵀ) D S + β k vᵀ            (a delta rule that erases along a key of its own)
    dplr       S ← (D + b aᵀ) S + k vᵀ                 (a reads the state before the decay)

    (β before a write that is additive may be given, too: ``S ← D S + β k vᵀ``)

    and then reads ``o = scale · Sᵀ q``, or by `reads` = "values" ``o = scale · S q``, with q as wide as v and o as k
    (transposed: a state that decays, and is corrected, along what is read). Any write goes with any decay; what a
    backend takes is its own. `lower_bound` is a log-decay below which no gate falls, where the caller knows one; it
    changes nothing but which kernels may be used.

    Raises:
        ArgumentError: an unknown write, decay or side; a bound above zero, or one of a decay that is not there.
    """

    write: Write
    decay: Decay
    lower_bound: float | None = None
    reads: Side = "keys"

    def __post_init__(self) -> None:
        sides = dict.fromkeys(("keys", "values"))
        words = ("write", self.write, _BROUGHT), ("decay", self.decay, _GATE), ("reads", self.reads, sides)
        for name, word, known in words:
            if word not in known:
                raise ArgumentError(name, f"one of {', '.join(known)}", repr(word))
        bound = self.lower_bound
        if bound is not None and not (isinstance(bound, (int, float)) and -math.inf < bound <= 0):
            raise ArgumentError("lower_bound", "a number at most 0, or None", repr(bound))
        if bound is not None and self.decay == "none":
            raise ArgumentError("lower_bound", "None, without a decay", repr(bound))

    @property
    def plain(self) -> Rule:
        """The rule without what is known of its gates."""
        return Rule(self.write, self.decay, reads=self.reads)

    @property
    def by_keys(self) -> Rule:
        """The rule that writes alike and reads by keys."""
        return Rule(self.write, self.decay, self.lower_bound)

    @property
    def transition(self) -> Transition:
        """The shape of the transition ``A`` of any run of tokens under this rule."""
        if self.write not in ("additive", "sum"):
            return "dense"
        return "identity" if self.decay == "none" else self.decay

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors a token brings, in the order the operators take them."""
        return ("q", "k", "v", *_GATE[self.decay], *_BROUGHT[self.write])

    def __str__(self) -> str:
        bound = "" if self.lower_bound is None else f"_{float(self.lower_bound)!r}"
        return f"{self.write}_{self.decay}{bound}" + ("" if self.reads == "keys" else f"_{self.reads}")

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The inverse of ``str``: operators carry their rule as a string."""
        write, decay, *rest = text.split("_")
        reads = rest.pop() if rest and rest[-1] == "values" else "keys"
        return cls(write, decay, *map(float, rest), reads=reads)  # type: ignore[arg-type, misc]


def transition_shape(kind: Transition, state: torch.Size) -> torch.Size | None:
    """Shape of ``A`` for a state of shape ``[..., H, K, V]``; None for the identity."""
    *lead, k, _ = state
    return {
        "identity": None,
        "scalar": torch.Size(lead),
        "diagonal": torch.Size([*lead, k]),
        "dense": torch.Size([*lead, k, k]),
    }[kind]


def act(kind: Transition, A: Tensor | None, S: Tensor) -> Tensor:
    """``A · S`` for a transition of any shape; ``S`` is ``[..., H, K, V]`` (or ``[..., H, K, K]`` to compose)."""
    if A is None or kind == "identity":
        return S
    if kind == "scalar":
        return A[..., None, None] * S
    return A[..., None] * S if kind == "diagonal" else A @ S


def transpose(kind: Transition, A: Tensor | None) -> Tensor | None:
    """``Aᵀ``: only a dense transition differs from its transpose."""
    return A.transpose(-1, -2) if A is not None and kind == "dense" else A


def outer(kind: Transition, G: Tensor, S: Tensor) -> Tensor | None:
    """The gradient of ``A`` in ``<G, A·S>``, in the shape of ``A``: ``G Sᵀ`` restricted to that shape."""
    if kind == "identity":
        return None
    if kind == "dense":
        return G @ S.transpose(-1, -2)
    per_key = (G * S).sum(-1)
    return per_key if kind == "diagonal" else per_key.sum(-1)


def product(kind: Transition, later: Tensor | None, earlier: Tensor | None) -> Tensor | None:
    """``later · earlier`` for two transitions of one shape."""
    if later is None or earlier is None:
        return None
    return later @ earlier if kind == "dense" else later * earlier


@dataclass(frozen=True)
class Affine:
    """The map ``S ↦ A·S + b`` of a run of tokens. ``A is None`` with kind "identity" is the identity."""

    kind: Transition
    A: Tensor | None
    b: Tensor

    def __call__(self, S: Tensor) -> Tensor:
        A, b = self.A, self.b
        if A is None or self.kind == "identity":
            return S + b
        if self.kind == "scalar":
            return torch.addcmul(b, A[..., None, None], S)
        if self.kind == "diagonal":
            return torch.addcmul(b, A[..., None], S)
        if S.dim() > 3:
            flat = torch.baddbmm(b.flatten(0, -3), A.flatten(0, -3), S.flatten(0, -3))
            return flat.view(*S.shape[:-2], *flat.shape[-2:])
        return A @ S + b

    def after(self, earlier: Affine) -> Affine:
        """``self ∘ earlier``: the map of the two runs, `earlier` first."""
        return Affine(self.kind, product(self.kind, self.A, earlier.A), self(earlier.b))

    def adjoint(self, b: Tensor) -> Affine:
        """The map the gradient of the state takes through this run, right to left; `b` is what the run adds to it."""
        return Affine(self.kind, transpose(self.kind, self.A), b)
