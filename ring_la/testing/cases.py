"""What a subject is tried on: lengths, packings, groups of heads, gates and states, for each split of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operations import Shapes, find
from .split import Order, Split
from .subject import Subject, name_of


@dataclass(frozen=True)
class Case:
    """One call of a subject: everything that its numbers follow from, the same on every rank."""

    name: str
    operation: str
    shapes: Shapes
    size: int
    kind: str | Order
    dtype: torch.dtype
    cu_seqlens: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    states: bool = False
    hard: bool = False
    seed: int = 0

    def __str__(self) -> str:
        options = "".join(f", {k}={v}" for k, v in self.options)
        return f"{self.name}, {name_of(self.kind)}, P = {self.size}{options}"

    @property
    def split(self) -> Split:
        """Who holds which tokens."""
        return Split.of(self.kind, self.shapes.T, self.size, self.cu_seqlens)

    @property
    def documents(self) -> int:
        """Rows of a state."""
        return self.shapes.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


class Numbers(NamedTuple):
    """A case's tensors, of the whole sequence, on the CPU: inputs and the initial state in its dtype, and what
    flows back into o and the final state, fp64."""

    inputs: dict[str, Tensor]
    initial_state: Tensor | None
    do: Tensor
    dfinal: Tensor | None


def numbers(case: Case) -> Numbers:
    """Draw a case's tensors; the same on every rank."""
    rng = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    operation, s = find(case.operation), case.shapes
    inputs = {n: x.to(case.dtype) for n, x in operation.inputs(s, draw, case.hard).items()}
    out = (s.B, s.T, s.H * s.V) if "x" in inputs and inputs["x"].dim() == 3 else (s.B, s.T, s.H, s.V)
    do = draw(*out)
    if not case.states or operation.state is None:
        return Numbers(inputs, None, do, None)
    shape = (case.documents, *operation.state(s))
    return Numbers(inputs, draw(*shape).float().to(_state_dtype(case.dtype)), do, draw(*shape))


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def cases(subject: Subject, size: int, seed: int = 0) -> Iterator[Case]:
    """All cases of a subject for a number of ranks."""
    for kind in subject.kinds:
        for options in subject.options:
            for case in _of_one_split(subject, size):
                changes = {"kind": kind, "options": tuple(options.items()), "seed": seed}
                yield Case(**{**case, **changes})


def _of_one_split(subject: Subject, size: int) -> Iterator[dict[str, Any]]:
    unit = 2 * size
    T = max(4, subject.tokens // unit) * unit
    H = subject.heads
    common = {"operation": subject.operation, "size": size, "dtype": subject.dtype}

    def case(name: str, T: int = T, B: int = 1, Hk: int = H, **rest: Any) -> dict[str, Any]:
        return {"name": name, "shapes": Shapes(B, T, H, Hk, subject.key_dim, subject.value_dim), **common, **rest}

    part, half, step = T // unit, T // size, subject.unit if subject.unit == 1 else subject.unit * size
    inside = _offsets(
        T, *(-(-t // step) * step for t in (1, part + part // 2, part + part // 2 + 1, T // 2 + part // 2))
    )
    borders = _offsets(T, part, half, T // 2, T - part)
    yield case("one sequence")
    yield case("two rows", B=2)
    yield case("documents that break inside shards", cu_seqlens=inside)
    yield case("documents that begin where shards do", cu_seqlens=borders)
    if "k" in (names := find(subject.operation).inputs(Shapes(1, 1, H, H, 2, 2), _zeros, False)) or "B" in names:
        yield case("groups of heads", Hk=H // 2)
    if find(subject.operation).gates or subject.operation in ("attention", "mamba2"):
        yield case("hard gates" if subject.operation != "attention" else "sharp scores", hard=True)
    odd = T + size + 1  # no multiple of the ranks: some shards are shorter, and not the last alone
    yield case("an uneven length", T=odd)
    yield case("an uneven length, packed", T=odd, cu_seqlens=_offsets(odd, part + 1, half + 2))
    if subject.has_states:
        yield case("states", B=2, states=True)
        yield case("states of documents", cu_seqlens=inside, states=True)
        yield case("states and an empty document", cu_seqlens=tuple(sorted((*inside, inside[2]))), states=True)
    if size > 1:
        yield case("fewer tokens than ranks", T=size - 1)
    if size > 1 and subject.has_states:
        yield case("states, fewer tokens than ranks", T=size - 1, states=True)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _offsets(T: int, *inner: int) -> tuple[int, ...]:
    return (0, *sorted({t for t in inner if 0 < t < T}), T)
