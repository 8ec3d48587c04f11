"""A recurrence made of others, on a split sequence, as a registered operator: to torch.compile one opaque node.

    ring_la::split_composed    its tensors, the parts of its initial state, numbers -> (o, the parts of the final state)

The parts of the call, each split by itself, run within the node; its gradients are those of the call made once more.
"""

from __future__ import annotations

import functools
from ast import literal_eval
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..choices import Mode, RecurrenceBackend
from ..context.handle import found
from ..context.operator import SplitOperator
from ..outputs import LinearAttentionOutput
from .arguments import check_arguments, state_dtype_of
from .composed import parts_of, run_composed
from .definition import CommonOptions, Definition

TENSORS, PARTS = 10, 4
"""The most tensors of a call, and parts of a state, that the operator has places for."""


def fits(definition: Definition, options: CommonOptions) -> bool:
    """Whether the operator has arguments for such a call."""
    few = len(definition.arguments) <= TENSORS and len(definition.states) <= PARTS
    return few and options.backend != "reference" and not options.in_place and options.cu_seqlens is None


def traced(number: int, definition: Definition, given: Mapping[str, Any], options: CommonOptions) -> Any:
    """A split call within a compiled graph. `number`: of the definition; `given`: the call's own arguments."""
    layout, state = options.layout, parts_of(options.initial_state)
    assert layout is not None
    tensors = [given.get(n) for n in definition.arguments]
    rest = "\n".join([f"{n}={x!r}" for n, x in given.items() if n not in definition.arguments])
    first = next(x for x in tensors if x is not None)
    out = split_composed(
        *tensors, *[None] * (TENSORS - len(tensors)), *state, *[None] * (PARTS - len(state)),
        layout.number, number, rest, options.scale, options.use_qk_l2norm, options.output_final_state,
        options.mode, options.backend, layout.num_documents if layout.packed else first.shape[0],
    )  # fmt: skip
    parts = out[1 : 1 + len(definition.states)]
    final: Any = None if not options.output_final_state else parts[0] if len(parts) == 1 else tuple(parts)
    return LinearAttentionOutput(out[0], final)


def _run(
    t0: Tensor | None,
    t1: Tensor | None,
    t2: Tensor | None,
    t3: Tensor | None,
    t4: Tensor | None,
    t5: Tensor | None,
    t6: Tensor | None,
    t7: Tensor | None,
    t8: Tensor | None,
    t9: Tensor | None,
    s0: Tensor | None,
    s1: Tensor | None,
    s2: Tensor | None,
    s3: Tensor | None,
    layout: int,
    definition: int,
    rest: str,
    scale: float | None,
    unit: bool,
    final: bool,
    form: str,
    backend: str | None,
    documents: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the parts of the final states, empty where there are none. `form` is the mode."""
    known: Definition = found(definition)
    tensors = (t0, t1, t2, t3, t4, t5, t6, t7, t8, t9)
    own = {n: x for n, x in zip(known.arguments, tensors) if x is not None}
    others = {n: literal_eval(x) for n, x in (line.split("=", 1) for line in rest.splitlines())}
    given = (s0, s1, s2, s3)[: len(known.states)]
    state: Any = None if s0 is None else s0 if len(given) == 1 else given
    choice = cast(Mode, form), cast("RecurrenceBackend | None", backend)
    options = CommonOptions(scale, state, final, unit, found(layout), None, *choice)
    call = functools.partial(known.describe, **own, **others)
    o, after = run_composed(known, call, options, tuple(sorted(others.items())))
    parts = [] if after is None else [*parts_of(after)]
    return o, *parts, *[o.new_empty(0) for _ in range(PARTS - len(parts))]  # pyright: ignore[reportReturnType]


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    (_, definition, *_), (final, _, _, documents) = arguments[TENSORS + PARTS :], arguments[-4:]
    known: Definition = found(definition)
    own = {n: x for n, x in zip(known.arguments, arguments) if x is not None}
    sizes = check_arguments(known.arguments, own)
    name = next(n for n in own if known.arguments[n].values)
    letters = [letter for letter in known.arguments[name].shape if letter in "BTHVD"]  # tokens, whatever their steps
    o = own[name].new_empty([sizes[letter] for letter in letters])
    shapes = [[documents, *(sizes[letter] for letter in part)] for part in known.states] if final else []
    parts = [torch.empty(shape, dtype=state_dtype_of(own), device=o.device) for shape in shapes]
    return o, *parts, *[o.new_empty(0) for _ in range(PARTS - len(parts))]


split_composed = SplitOperator("split_composed", _run, _fake, TENSORS + PARTS)
