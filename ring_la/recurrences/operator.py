"""A recurrence on a split sequence as a registered operator, so that torch.compile sees one opaque node.

    ring_la::split_recurrence    tokens, initial states, a denominator's own q and k, the layout's number
                                 -> (o, final states), and its gradients

Bidirectional or not. Registered at import with a fake.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor

from ..algebra import Rule
from ..choices import Mode, RecurrenceBackend
from ..context.handle import found
from ..context.operator import SplitOperator
from ..kernels import Inputs, state_dtype
from ..schemas import declared, taken_apart
from .definition import CommonOptions, Normalizer, Recurrence
from .run import agreed, compute


def names_of(r: Recurrence) -> str:
    """The caller's names of the inputs, as the operator takes them."""
    return "\n".join([f"{field}={name}" for field, name in r.names.items()])


class RecurrenceOthers(NamedTuple):
    """What a split call has beside its inputs.

    Attributes:
        normalizer_q, normalizer_k, eps: a denominator, with which the states have a column more.
        layout: its number. documents: how many there are.
        name: of the definition. names: as `names_of` gives them. flags: of the function's own, for messages.
        form: the mode: torch's functionalisation cannot pass on an argument of that name.
        final: whether the final states are wanted.
    """

    initial_state: Tensor | None
    normalizer_q: Tensor | None
    normalizer_k: Tensor | None
    eps: float
    layout: int
    documents: int
    name: str
    rule: str
    scale: float
    form: str
    backend: str | None
    causal: bool
    final: bool
    names: str
    flags: str


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` and the final states ``[N, H, K, V]`` of so many documents, empty unless `final`."""
    inputs, call = taken_apart(arguments, Inputs, RecurrenceOthers)
    named = dict([n.split("=", 1) for n in call.names.splitlines()])
    choice = cast(Mode, call.form), cast("RecurrenceBackend | None", call.backend)
    options = CommonOptions(call.scale, call.initial_state, call.final, False, found(call.layout), None, *choice)

    own = None
    if call.normalizer_q is not None and call.normalizer_k is not None:
        own = Normalizer(call.normalizer_q, call.normalizer_k, call.eps)

    def described() -> Recurrence:
        return Recurrence(Rule.parse(call.rule), inputs, call.causal, names=named, normalizer=own)

    out = compute(agreed(call.name, described, options, (("flags", call.flags),)), call.scale, options)
    return out.o, inputs.q.new_empty(0, dtype=state_dtype(*inputs)) if out.final_state is None else out.final_state


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, call = taken_apart(arguments, Inputs, RecurrenceOthers)
    like, more = inputs.like_output(Rule.parse(call.rule)), int(call.normalizer_q is not None)
    *outer, width = inputs.state
    shape = (call.documents, *outer, width + more) if call.final else (0,)
    return like.new_empty(like.shape), inputs.q.new_empty(shape, dtype=state_dtype(*inputs))


split_recurrence = SplitOperator(
    "split_recurrence",
    _run,
    _fake,
    len(Inputs._fields) + 3,
    schema=f"({declared(Inputs, RecurrenceOthers)}) -> (Tensor, Tensor)",
)
