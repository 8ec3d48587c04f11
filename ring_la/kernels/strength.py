"""Additive writes times a strength, and what of v passes by the state:

    S ← D S + β k vᵀ        o = scale · Sᵀ q + a v

by kernels that read β and a, or by any backend of plain additive writes, which is given β v for v:

    dv = β d(β v) + a do        dβ = v · d(β v)        da = v · do
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from ..algebra import Rule
from .protocol import Adjoint, Backward, Border, InputGradients, Inputs, Local, Output, Summary


def given(rule: Rule, inputs: Inputs) -> bool:
    """Whether tokens bring a strength or what passes by."""
    return rule.write == "additive" and (inputs.beta is not None or inputs.a is not None)


def read(rule: Rule, inputs: Inputs) -> bool:
    """Whether the kernels for chunks of a scalar decay, where they take a call, read both, a being the same at a head's
    tokens (expanded over them)."""
    half, sizes = inputs.v.dtype.itemsize == 2, (inputs.k.shape[-1], inputs.v.shape[-1])
    a = inputs.a
    by_head = a is None or all(n == 1 or step == 0 for n, step in zip(a.shape[:2], a.stride()))
    return rule.decay == "scalar" and half and max(sizes) <= 128 and by_head and inputs.beta is not None


class Strengthened:
    """See `protocol.Local`. `plain` makes a backend of inputs without β and a."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(self, plain: Callable[[Inputs], Local[Any, Any]], inputs: Inputs) -> None:
        self.inputs = inputs
        self.local = plain(inputs._replace(v=self._times(inputs.v, inputs.beta), beta=None, a=None))

    @staticmethod
    def _times(x: Tensor, factor: Tensor | None) -> Tensor:
        return x if factor is None else (x * factor[..., None]).to(x.dtype)

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Any] | None = None) -> Summary[Any]:
        return self.local.summary(S0, through, known)

    def prepare(self, summary: Summary[Any]) -> Summary[Any]:
        return self.local.prepare(summary)

    def output(self, S0: Tensor | None, summary: Summary[Any] | None = None, border: Border | None = None) -> Output:
        assert border is None  # see `crosses`
        out, v, a = self.local.output(S0, summary), self.inputs.v, self.inputs.a
        return out if a is None else dataclasses.replace(out, o=(out.o + v * a[..., None]).to(out.o.dtype))

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
        (_, _, v, _, beta, a, _), dw, do = self.inputs, found.inputs.v, backward.do
        dv = self._times(dw, beta)
        more = {} if beta is None else {"beta": (v * dw.to(beta.dtype)).sum(-1)}
        if a is not None:
            more["a"] = (v * do.to(a.dtype)).sum(-1)
            dv = (dv + do * a[..., None]).to(v.dtype)
        return found._replace(inputs=found.inputs._replace(v=dv, **more))
