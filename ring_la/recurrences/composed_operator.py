"""A recurrence made of others, on a split sequence, as a registered operator: to torch.compile one opaque node.

    ring_la::split_composed    its tensors, the parts of its initial state, numbers -> (o, the parts of the final state)

The parts of the call, each split by itself, run within the node; its gradients are those of the call made once more. So
do, on one device, those whose parts no compiler follows (`Definition.opaque`).
"""

from __future__ import annotations

import functools
from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..choices import Mode, RecurrenceBackend
from ..context import ShardedLayout
from ..context.handle import found, layout_of, number_of
from ..context.operator import SplitOperator
from ..outputs import LinearAttentionOutput
from ..schemas import declared
from .arguments import check_arguments, state_dtype_of
from .composed import parts_of, run_composed
from .definition import CommonOptions, Definition

TENSORS, PARTS = 10, 4
"""The most tensors of a call, and parts of a state, that the operator has places for."""


def fits(definition: Definition, options: CommonOptions) -> bool:
    """Whether the operator has arguments for such a call."""
    few = len(definition.arguments) <= TENSORS and len(definition.states) <= PARTS
    where = isinstance(options.layout, ShardedLayout) and options.cu_seqlens is None
    where = where or (options.layout is None and definition.opaque)
    return few and where and options.backend != "reference" and not options.in_place


def traced(number: str, definition: Definition, given: Mapping[str, Any], options: CommonOptions) -> Any:
    """Such a call within a compiled graph. `number`: of the definition; `given`: the call's own arguments."""
    layout, cu, state = options.layout, options.cu_seqlens, parts_of(options.initial_state)
    tensors = [given.get(n) for n in definition.arguments]
    rest = {n: x for n, x in given.items() if n not in definition.arguments}
    numbers = {n: x for n, x in rest.items() if isinstance(x, int) and not isinstance(x, bool)}
    fractions = {n: x for n, x in rest.items() if isinstance(x, float)}
    documents = next(x for x in tensors if x is not None).shape[0] if cu is None else cu.shape[0] - 1
    others = ComposedOthers(
        cu_seqlens=cu,
        layout=number_of(layout),
        definition=number,
        names="\n".join([*numbers, *fractions]),
        numbers=[*numbers.values()],
        fractions=[*fractions.values()],
        rest="\n".join([f"{n}={x!r}" for n, x in rest.items() if n not in numbers and n not in fractions]),
        scale=options.scale,
        unit=options.use_qk_l2norm,
        final=options.output_final_state,
        form=options.mode,
        backend=options.backend,
        documents=layout.num_documents if layout is not None and layout.packed else documents,
    )
    out = split_composed(*_padded(tensors, TENSORS), *_padded(state, PARTS), *others)
    parts = out[1 : 1 + len(definition.states)]
    final: Any = None if not options.output_final_state else parts[0] if len(parts) == 1 else tuple(parts)
    return LinearAttentionOutput(out[0], final)


def _padded(x: Sequence[Tensor | None], places: int) -> list[Tensor | None]:
    return [*x, *[None] * (places - len(x))]


class ComposedOthers(NamedTuple):
    """What a call has beside its tensors.

    Attributes:
        layout: its number, 0 for none. definition: its number, written out: a compiler may leave an int open.
        names, numbers, fractions: its own arguments that are ints, then floats, which a compiler may leave open.
        rest: those that are no tensors either, a line each.
        unit: whether q and k become of unit length. final: whether the final state is wanted. form: the mode.
        documents: how many there are.
    """

    cu_seqlens: Tensor | None
    layout: int
    definition: str
    names: str
    numbers: Sequence[int]
    fractions: Sequence[float]
    rest: str
    scale: float | None
    unit: bool
    final: bool
    form: str
    backend: str | None
    documents: int


class ComposedCall(NamedTuple):
    """An operator's arguments: the tensors by the names of the definition, the parts of the state, and the rest."""

    definition: Definition
    own: dict[str, Tensor]
    state: tuple[Tensor | None, ...]
    others: ComposedOthers

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> ComposedCall:
        others = ComposedOthers(*arguments[TENSORS + PARTS :])
        known: Definition = found(int(others.definition))
        own = {n: x for n, x in zip(known.arguments, arguments[:TENSORS]) if x is not None}
        state = arguments[TENSORS : TENSORS + len(known.states)]
        return cls(known, own, tuple(state), others)


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    """o and the parts of the final states, empty where there are none."""
    known, own, given, x = ComposedCall.of(arguments)
    others = {n: literal_eval(value) for n, value in (line.split("=", 1) for line in x.rest.splitlines())}
    others |= zip(x.names.splitlines(), [*x.numbers, *x.fractions])
    state: Any = None if given[0] is None else given[0] if len(given) == 1 else given
    choice = cast(Mode, x.form), cast("RecurrenceBackend | None", x.backend)
    options = CommonOptions(x.scale, state, x.final, x.unit, layout_of(x.layout), x.cu_seqlens, *choice)
    call = functools.partial(known.describe, **own, **others)
    o, after = run_composed(known, call, options, tuple(sorted(others.items())))
    parts = [] if after is None else [*parts_of(after)]
    return o, *parts, *[o.new_empty(0) for _ in range(PARTS - len(parts))]


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    known, own, _, call = ComposedCall.of(arguments)
    sizes = check_arguments(known.arguments, own)
    name = next(n for n in own if known.arguments[n].values)
    letters = known.arguments[name].shape.replace("N", "")  # tokens, whatever their steps
    o = own[name].new_empty([sizes[letter] for letter in letters])
    shapes = [[call.documents, *(sizes[letter] for letter in part)] for part in known.states] if call.final else []
    parts = [torch.empty(shape, dtype=state_dtype_of(own), device=o.device) for shape in shapes]
    return o, *parts, *[o.new_empty(0) for _ in range(PARTS - len(parts))]


PLACES = ", ".join([*(f"Tensor? t{n}" for n in range(TENSORS)), *(f"Tensor? s{n}" for n in range(PARTS))])
RESULTS = ", ".join(["Tensor"] * (1 + PARTS))

split_composed = SplitOperator(
    "split_composed", _run, _fake, TENSORS + PARTS, schema=f"({PLACES}, {declared(ComposedOthers)}) -> ({RESULTS})"
)
