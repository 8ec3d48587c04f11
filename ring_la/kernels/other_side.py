"""A rule that reads the other side of its state, ``o = scale · S q``, by the backend of the rule that reads by keys.

Of ``Σ_t c_tᵀ S_t q_t`` the gradient of c is what the one reads, and the gradient of q what the other does. So were c
the queries of the rule that reads by keys, and q the gradient of its output, then

    the gradient of its queries is o, whatever its queries are;
    with c the gradient of o, its output is the gradient of q, and its other gradients are ours.

States, transitions and everything that ranks exchange are those of that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .protocol import Adjoint, Backward, Border, InputGradients, Inputs, Local, Output, Summary
from .pytorch.recurrent import TokenRecurrence


class OtherSide:
    """See `protocol.Local`. `by_keys` makes the backend of the rule that reads by keys; `tokens` gives the output of a
    few tokens, one by one; `final`: `OutputUse.final`."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(
        self, by_keys: Callable[..., Local[Any, Any]], inputs: Inputs, tokens: TokenRecurrence | None, final: bool
    ) -> None:
        self.by_keys, self.inputs, self.tokens, self.final = by_keys, inputs, tokens, final

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Any] | None = None) -> Summary[Any]:
        return self._with(None).summary(S0, through, known)

    def prepare(self, summary: Summary[Any]) -> Summary[Any]:
        return summary

    def output(self, S0: Tensor | None, summary: Summary[Any] | None = None, border: Border | None = None) -> Output:
        assert border is None  # see `crosses`
        if self.tokens is not None:
            return self.tokens.output(S0)
        local = self._with(None)
        read = local.gradients(Backward(S0, self.inputs.q, gate=False, queries=True), None).inputs.q
        leaving = local.summary(S0, False, summary).leaving if self.final else None
        return Output(read.to(self.inputs.k.dtype), leaving)

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Any]:
        return self._with(backward.do).adjoint(self._back(backward), dS_end)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Any]) -> Adjoint[Any]:
        return self._with(backward.do).prepare_gradients(self._back(backward), adjoint)

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Any] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        assert border is None
        local = self._with(backward.do)
        dq = local.output(backward.S0).o
        found = local.gradients(self._back(backward), dS_end, adjoint)
        return InputGradients(found.inputs._replace(q=dq), found.entering)

    def _with(self, c: Tensor | None) -> Local[Any, Any]:
        """The rule that reads by keys, with c (None: whatever they are, so the keys) for queries."""
        k = self.inputs.k
        queries = k if c is None else c.to(k.dtype)
        return self.by_keys(inputs=self.inputs._replace(q=queries))

    def _back(self, backward: Backward) -> Backward:
        return Backward(backward.S0, self.inputs.q, gate=backward.gate)
