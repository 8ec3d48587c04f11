"""A recurrence on a split sequence as a registered operator, so that torch.compile sees one opaque node.

    ring_la::split_recurrence    tokens, initial states, a denominator's own q and k, the layout's number
                                 -> (o, final states), and its gradients

Bidirectional or not. Registered at import with a fake.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..algebra import Rule
from ..choices import Mode, RecurrenceBackend
from ..context.handle import found
from ..context.operator import SplitOperator
from ..kernels import Inputs, state_dtype
from .definition import CommonOptions, Recurrence
from .run import agreed, compute


def names_of(r: Recurrence) -> str:
    """The caller's names of the inputs, as the operator takes them."""
    return "\n".join([f"{field}={name}" for field, name in r.names.items()])


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    initial_state: Tensor | None,
    normalizer_q: Tensor | None,
    normalizer_k: Tensor | None,
    layout: int,
    documents: int,
    name: str,
    rule: str,
    scale: float,
    form: str,
    backend: str | None,
    causal: bool,
    final: bool,
    names: str,
    flags: str,
) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` and the final states ``[N, H, K, V]`` of so many documents, empty unless `final`; with a
    denominator's own q and k, one more column of both.

    `form` is the mode: torch's functionalisation cannot pass on an argument of that name.
    """
    inputs, named = Inputs(q, k, v, g, beta, a, b), dict([n.split("=", 1) for n in names.splitlines()])
    choice = cast(Mode, form), cast("RecurrenceBackend | None", backend)
    options = CommonOptions(scale, initial_state, final, False, found(layout), None, *choice)

    own = None if normalizer_q is None or normalizer_k is None else (normalizer_q, normalizer_k)

    def described() -> Recurrence:
        return Recurrence(Rule.parse(rule), inputs, causal, names=named, normalizer=own)

    r, decays = agreed(name, described, options, (("flags", flags),))
    out = compute(r, scale, options, decays)
    return out.o, q.new_empty(0, dtype=state_dtype(*inputs)) if out.final_state is None else out.final_state


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    initial_state: Tensor | None,
    normalizer_q: Tensor | None,
    normalizer_k: Tensor | None,
    layout: int,
    documents: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    final, inputs = rest[-3], Inputs(q, k, v, g, beta, a, b)
    like, more = inputs.like_output(Rule.parse(rest[1])), int(normalizer_q is not None)
    *outer, width = inputs.state
    shape = (documents, *outer, width + more) if final else (0,)
    return like.new_empty((*like.shape[:-1], like.shape[-1] + more)), q.new_empty(shape, dtype=state_dtype(*inputs))


split_recurrence = SplitOperator("split_recurrence", _run, _fake, 10)
