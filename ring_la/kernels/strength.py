"""Additive writes times a strength, ``S ← D S + β k vᵀ``: by kernels that read β, or by any backend of additive writes
that is given β v for v.

    dv = β d(β v)        dβ = v · d(β v)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from ..algebra import Rule
from .protocol import Adjoint, Backward, Border, InputGradients, Inputs, Local, Output, Summary


def given(rule: Rule, inputs: Inputs) -> bool:
    """Whether what is written comes times a strength beside it."""
    return rule.write == "additive" and inputs.beta is not None


def read(rule: Rule, inputs: Inputs) -> bool:
    """Whether the kernels for chunks of a scalar decay, where they take a call, read the strength themselves."""
    half, sizes = inputs.v.dtype.itemsize == 2, (inputs.k.shape[-1], inputs.v.shape[-1])
    return rule.decay == "scalar" and half and max(sizes) <= 128


class Strengthened:
    """See `protocol.Local`. `plain` makes a backend of inputs without β."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(self, plain: Callable[[Inputs], Local[Any, Any]], inputs: Inputs) -> None:
        assert inputs.beta is not None
        self.v, self.beta = inputs.v, inputs.beta[..., None]
        written = (self.v * self.beta).to(self.v.dtype)
        self.local = plain(inputs._replace(v=written, beta=None))

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Any] | None = None) -> Summary[Any]:
        return self.local.summary(S0, through, known)

    def prepare(self, summary: Summary[Any]) -> Summary[Any]:
        return self.local.prepare(summary)

    def output(self, S0: Tensor | None, summary: Summary[Any] | None = None, border: Border | None = None) -> Output:
        assert border is None  # see `crosses`
        return self.local.output(S0, summary)

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Any]:
        return self.local.adjoint(backward, dS_end)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Any]) -> Adjoint[Any]:
        return self.local.prepare_gradients(backward, adjoint)

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Any] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        assert border is None
        found = self.local.gradients(backward, dS_end, adjoint)
        dw = found.inputs.v
        db = (dw.to(self.beta.dtype) * self.v).sum(-1)
        return found._replace(inputs=found.inputs._replace(v=(dw * self.beta).to(self.v.dtype), beta=db))
