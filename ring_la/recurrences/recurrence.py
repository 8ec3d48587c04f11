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

from .. import linear
from .. import reference as references
from ..autograd import outside_graphs, refuse_transforms, transformed
from ..context import ShardedLayout
from ..errors import RingLAError, UnsupportedError
from ..kernels import Inputs, state_dtype
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from .agreement import Flags, agree
from .bidirectional import bidirectional
from .checks import check
from .definition import CommonOptions, Definition, Recurrence

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
        run = _run_outside_graphs if torch.compiler.is_compiling() else _run
        return run(definition, call, options, flags)

    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput
    )
    function.__doc__ = textwrap.dedent(f"    {describe.__doc__}") + definition.keywords
    function.definition = definition  # type: ignore[attr-defined]
    return function


def _run(
    definition: Definition, call: functools.partial[Recurrence], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    r, error, decays = None, None, None
    layout = options.layout
    try:
        if transformed() and options.backend != "reference":
            refuse_transforms(_given(call, options))
        r = call()
        check(r, options)
    except RingLAError as e:
        error = e
    split = isinstance(layout, ShardedLayout)
    if error is not None:
        if split:
            layout.agree(definition.name, None, error)  # raises, on every rank
        raise error
    if split:
        decays = agree(definition.name, r, options, flags)
    if options.backend == "reference":
        return _by_reference(definition, call, r, options)
    scale = definition.scale(options, r.inputs.q.shape[-1])
    inputs = _ready(r.inputs, options.use_qk_l2norm)
    if r.causal:
        out = linear.run(r.rule, inputs, scale, options, decays)
    else:
        out = bidirectional(inputs, scale, options, _unit(r.normalizer, options.use_qk_l2norm))
    return LinearAttentionOutput(r.readout(out.o), out.final_state)


_run_outside_graphs = outside_graphs(_run)


def _given(call: functools.partial[Recurrence], options: CommonOptions) -> Iterator[tuple[str, object]]:
    """A call's own arguments and its initial state, by name."""
    yield from zip(inspect.signature(call.func).parameters, call.args)
    yield from call.keywords.items()
    yield "initial_state", options.initial_state


def _ready(x: Inputs, unit_length: bool) -> Inputs:
    """What kernels take: q and k of unit length where that is asked for, and gates and the like that come with the
    heads of q and k repeated for the value heads they serve."""
    heads = x.v.shape[2]
    if not unit_length and x.q.shape[2] == heads:
        return x

    def own(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)

    q, k = (l2norm(x.q), l2norm(x.k)) if unit_length else (x.q, x.k)
    return Inputs(q, k, x.v, *map(own, x[3:]))


def _unit(normalizer: tuple[Tensor, Tensor] | None, unit_length: bool) -> tuple[Tensor, Tensor] | None:
    """A denominator's own q and k, of unit length where that is asked for."""
    return normalizer if normalizer is None or not unit_length else (l2norm(normalizer[0]), l2norm(normalizer[1]))


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
