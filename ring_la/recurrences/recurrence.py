"""What makes a file in this folder a public function.

A recurrence is described by a function from its own arguments to a `Recurrence`: the rule, and what its tokens
bring under it. `recurrence` makes it a `Definition`, adds the keywords all recurrences have in common, checks, lets the
ranks agree, and runs.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from operator import itemgetter

import torch
from torch import Tensor

from .. import reference as references
from ..autograd import refuse_transforms, transformed
from ..context import ShardedLayout
from ..errors import UnsupportedError
from ..kernels import state_dtype
from ..outputs import LinearAttentionOutput
from .agreement import Flags
from .definition import CommonOptions, Definition, Recurrence
from .operator import names_of, split_recurrence
from .run import agreed, compute, ready

Public = Callable[..., LinearAttentionOutput]


def recurrence(
    *, paper: str, default_scale: float | None = None, reference: Public | None = None
) -> Callable[[Callable[..., Recurrence]], Public]:
    """Decorator: the public function of a recurrence, by the description of one; `function.definition` is what is
    known of it before any call.

    Args:
        paper: where it comes from. default_scale: the scale where the caller gives none; None means K**-0.5.
        reference: the same function as an fp64 token loop; None: the one of its name in `ring_la.reference`, if any.
    """

    def define(describe: Callable[..., Recurrence]) -> Public:
        name = describe.__name__
        loop = getattr(references, name, None) if reference is None else reference
        return public(Definition(name, describe, loop, paper, default_scale))

    return define


def public(definition: Definition) -> Public:
    """The function of a definition: its own arguments, then the common keywords."""
    describe = definition.describe
    own = inspect.signature(describe)
    fields = inspect.signature(CommonOptions).parameters.values()
    common = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=p.annotation.__forward_arg__)  # as it is written
        for p in fields
    ]
    names = frozenset(p.name for p in common)

    @functools.wraps(describe)
    def function(*args, **keywords) -> LinearAttentionOutput:
        options = CommonOptions(**{k: keywords.pop(k) for k in [*keywords] if k in names})
        call = functools.partial(describe, *args, **keywords)
        if options.layout is None:
            return _run(definition, call, options, ())
        named = sorted((*zip(own.parameters, args), *keywords.items()), key=itemgetter(0))
        flags = tuple([(n, x) for n, x in named if not isinstance(x, Tensor)])
        traced = torch.compiler.is_compiling() and isinstance(options.layout, ShardedLayout)
        return (_traced if traced else _run)(definition, call, options, flags)

    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput
    )
    function.__doc__ = textwrap.dedent(f"    {describe.__doc__}") + definition.keywords
    function.definition = definition  # type: ignore[attr-defined]
    return function


def _run(
    definition: Definition, call: functools.partial[Recurrence], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    def described() -> Recurrence:
        if transformed() and options.backend != "reference":
            refuse_transforms(_given(call, options))
        return call()

    r, decays = agreed(definition.name, described, options, flags)
    if options.backend == "reference":
        return _by_reference(definition, call, r, options)
    out = compute(r, definition.scale(options, r.inputs.q.shape[-1]), options, decays)
    return LinearAttentionOutput(r.readout(out.o), out.final_state)


def _traced(
    definition: Definition, call: functools.partial[Recurrence], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    """A split call within a compiled graph: what needs other ranks is one node, which checks when it runs."""
    r, layout = call(), options.layout
    if options.backend == "reference" or options.in_place:
        raise UnsupportedError("layout", "None for backend='reference' and in_place=True", repr(layout))
    inputs = ready(r.inputs, options.use_qk_l2norm)
    documents = layout.num_documents if layout.packed else inputs.q.shape[0]
    o, final = split_recurrence(
        *inputs, options.initial_state, layout.number, documents, definition.name, str(r.rule),
        definition.scale(options, inputs.q.shape[-1]), options.mode, options.backend, r.causal,
        options.output_final_state, names_of(r), ", ".join([f"{n}={x}" for n, x in flags]),
    )  # fmt: skip
    return LinearAttentionOutput(r.readout(o), final if options.output_final_state else None)


def _given(call: functools.partial[Recurrence], options: CommonOptions) -> Iterator[tuple[str, object]]:
    """A call's own arguments and its initial state, by name."""
    yield from zip(inspect.signature(call.func).parameters, call.args)
    yield from call.keywords.items()
    yield "initial_state", options.initial_state


def _by_reference(
    definition: Definition, call: functools.partial[Recurrence], r: Recurrence, options: CommonOptions
) -> LinearAttentionOutput:
    """The fp64 token loop, returned in the dtypes of the other backends."""
    if definition.reference is None:
        expected = f"None, 'triton' or 'torch' for {definition.name}"
        raise UnsupportedError("backend", expected, "'reference'", "It is defined without one")
    args, keywords = call.args, call.keywords
    common = {k: x for k, x in options._asdict().items() if k != "in_place"}
    out = definition.reference(*args, **keywords, **common)
    values = args[0] if args else keywords.get("v", keywords.get("x"))  # q, k and v have one dtype
    final = None if out.final_state is None else out.final_state.to(state_dtype(*r.inputs))
    return LinearAttentionOutput(out.o.to(values.dtype), final)
