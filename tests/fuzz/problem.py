"""What a case asks: tensors, how they are split, the split call, the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ring_la

from .case import Case

Tensors = dict[str, Tensor]


@dataclass
class Problem:
    """One call, whole.

    Attributes:
        tokens: inputs with tokens in dimension 1, of the whole sequence, fp64. They want gradients.
        shared: inputs that all tokens share; the gradient is each rank's part. replicated: the gradient is whole.
        truth: o, states and the like of the whole sequence by name, in fp64, from all inputs by name.
        ours: the same from this rank's inputs; `Here` has the layouts.
        where: for each output the dimension of its tokens; None: whole on every rank; "part": the sum over ranks is it.
        layouts: other layouts than the case's own, by name: what makes them. of: inputs (and outputs) that are split
            by one of them.
        dtypes: inputs that have another dtype than the case's. results: outputs that have.
        gradients: whether they are compared. exact: outputs that must be equal.
        bound: of fp64's relative errors.
    """

    truth: Callable[[Tensors], Tensors]
    ours: Callable[[Tensors, Here], Tensors]
    where: dict[str, int | str | None]
    tokens: Tensors = field(default_factory=dict)
    shared: Tensors = field(default_factory=dict)
    replicated: Tensors = field(default_factory=dict)
    layouts: dict[str, Callable[[ring_la.ContextParallel], ring_la.ShardedLayout]] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    results: dict[str, torch.dtype] = field(default_factory=dict)
    gradients: bool = True
    exact: tuple[str, ...] = ()
    bound: float = 1e-9

    @property
    def inputs(self) -> Tensors:
        return self.tokens | self.shared | self.replicated


@dataclass
class Here:
    """Where a rank stands: its ContextParallel, the case's layout, others by name."""

    cp: ring_la.ContextParallel
    layout: ring_la.ShardedLayout
    others: dict[str, ring_la.ShardedLayout]

    def of(self, name: str | None) -> ring_la.ShardedLayout:
        return self.layout if name is None else self.others[name]


class Numbers:
    """A case's numbers, fp64, the same on every rank."""

    def __init__(self, case: Case) -> None:
        self.rng = torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.rng, dtype=torch.float64)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.rng)


def state_dtype(case: Case) -> torch.dtype:
    """Of states: fp32, or fp64 for fp64."""
    return torch.promote_types(case.torch_dtype, torch.float32)


def make(case: Case) -> Problem:
    """The problem of a case."""
    from . import decoding, grids, local, moves, recurrences, softmax

    makers: dict[str, Callable[[Case], Problem]] = {
        "attention": softmax.attention, "forgetting_attention": softmax.forgetting, "mla": softmax.mla,
        "sparse_attention": softmax.sparse, "chosen": softmax.chosen, "short_conv": local.short_conv,
        "token_shift": local.token_shift, "grouped_gemm": local.grouped_gemm,
        "bidirectional": recurrences.bidirectional, "scan": recurrences.scan, "moves": moves.moves, "grid": grids.grid,
        "loss": moves.loss,
        "running_sum": moves.running_sum,
        "decoding": decoding.recurrent, "model": decoding.model, "log_linear_attention": softmax.log_linear,
    }  # fmt: skip
    return makers.get(case.op, recurrences.recurrence)(case)


Options = dict[str, Any]
