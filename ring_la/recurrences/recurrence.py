"""What makes a file in this folder a public function.

A recurrence is described by a function from its own arguments to a `Recurrence`: the rule, and what its tokens
bring under it. `recurrence` makes it a `Definition`, adds the keywords all recurrences have in common, checks, lets the
ranks agree, and runs.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import linear
from .. import reference as references
from ..algebra import Rule
from ..autograd import outside_graphs, refuse_transforms, transformed
from ..blockwise import at_once, by_block, by_element, fixed
from ..context import ShardedLayout
from ..context.handle import enter
from ..errors import ArgumentError, RingLAError, UnsupportedError
from ..kernels import Inputs, state_dtype
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from ..reference.by_token import Loop, Token, by_token
from . import composed_operator
from .agreement import Flags
from .arguments import Argument, check_arguments, check_declared, check_heads
from .composed import run_composed
from .definition import CommonOptions, Definition, Recurrence
from .operator import RecurrenceOthers, names_of, split_recurrence
from .run import agreed, compute, ready, unit

ALIKE = frozenset(
    ["delta_rule", "gated_delta_rule", "kda", "gla", "hgrn2", "simple_gla", "retention", "lightning_attention",
     "dplr_delta_rule", "rwkv7", "_by_head", "_by_channel"]
)  # fmt: skip
"""Recurrences whose tokens bring what they are given, or what is made of it by element, q and k perhaps at unit length:
row by row, on any device."""

ASIDE = ALIKE | {"linear_attention", "mamba2"}
"""Recurrences whose q and k go nowhere but into the rule: they may be of unit length behind the description."""

Public = Callable[..., LinearAttentionOutput]


def recurrence(
    *,
    paper: str,
    equation: str = "",
    arguments: Mapping[str, Argument] = MappingProxyType({}),
    token: Token | None = None,
    reference: Public | None = None,
    default_scale: float | None = None,
    states: tuple[str, ...] = ("HKV",),
    flags: Mapping[str, object] = MappingProxyType({}),
    sizes: Mapping[str, int] = MappingProxyType({}),
    same_bits: bool = False,
    opaque: bool = False,
    at_once: Callable[..., Recurrence | None] | None = None,
    check: Callable[[Mapping[str, int]], None] | None = None,
    alone: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Public]:
    """Decorator: the public function of a recurrence, by the description of one; `function.definition` is what is
    known of it before any call.

    The description is a function of the recurrence's own arguments. It returns a `Recurrence`, the rule its tokens
    follow and what they bring under it; or, with a keyword `options`, it is the whole call, made of other recurrences.

    Args:
        paper: where it comes from. equation: what a token does to the state, in a line.
        arguments: the tensors it takes, by name: their shapes, and what kind of numbers they hold.
        token: one token of the reference, ``token(S, …) -> (S, o)``, written apart (see `reference.by_token`).
        reference: the whole reference instead; neither: the one of its name in `ring_la.reference`, if any.
        default_scale: the scale where the caller gives none; None means K**-0.5.
        states: the parts of its state, the dimensions after N a letter each.
        flags: its own arguments that are no tensors, for examples. sizes: of its own letters, for examples.
        same_bits: of a whole call: what it does to tokens goes through `ring_la.by_block` with the call's layout. Else
            deterministic layouts are refused. opaque, at_once: see `Definition`.
        check: of a whole call: refuses sizes, by letter, that do not fit together, before ranks send anything.
        alone: the description of calls without a layout, where it differs.
    """

    def define(describe: Callable[..., Any]) -> Public:
        name = describe.__name__
        check_declared(arguments, _own(describe).parameters, inspect.signature(CommonOptions).parameters)
        loop = getattr(references, name, None) if reference is None else reference
        if token is not None:
            loop = by_token(name, _loop(token, arguments, states, default_scale), _own(describe))
        rest = default_scale, states, flags, sizes, same_bits, check, opaque, at_once, alone
        return public(Definition(name, describe, loop, paper, equation, arguments, *rest))

    return define


def _loop(token: Token, arguments: Mapping[str, Argument], states: tuple[str, ...], scale: float | None) -> Loop:
    """The reference that `token` is one token of."""
    queries, keys = ([n for n, a in arguments.items() if a.kind == kind] for kind in ("query", "key"))
    return Loop(token, {n: a.shape for n, a in arguments.items()}, queries, keys, states, scale)


def _own(describe: Callable[..., Any]) -> inspect.Signature:
    """A description's arguments but for `options`."""
    signature = inspect.signature(describe)
    return signature.replace(parameters=[p for n, p in signature.parameters.items() if n != "options"])


def _common(definition: Definition) -> list[inspect.Parameter]:
    """The keywords of all recurrences, as they are written in `CommonOptions`."""
    fields = inspect.signature(CommonOptions).parameters.values()
    own = {"initial_state": "tuple[Tensor, ...] | None"} if len(definition.states) > 1 else {}
    return [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own.get(p.name, p.annotation.__forward_arg__))
        for p in fields
    ]


def public(definition: Definition) -> Public:
    """The function of a definition: its own arguments, then the common keywords."""
    describe, alone = definition.describe, definition.alone or definition.describe
    own, unit_first = _own(describe), None
    common = _common(definition)
    names = frozenset(p.name for p in common)
    composed, names_of_own, number = definition.composed, tuple(own.parameters), str(enter(definition))
    if not composed and definition.name not in ASIDE:
        unit_first = _of_unit_length(definition)
    _ = definition.own  # found now: torch.compile cannot trace the first read of a cached property
    run = run_composed if composed else _run
    apart = outside_graphs(run)

    @functools.wraps(describe)
    def function(*args: Any, **keywords: Any) -> LinearAttentionOutput:
        options = CommonOptions(**{k: keywords.pop(k) for k in [*keywords] if k in names})
        description = alone if options.layout is None else describe
        if unit_first is not None and options.use_qk_l2norm:
            description = unit_first
        call = functools.partial(description, *args, **keywords)
        compiling = torch.compiler.is_compiling()
        if compiling and composed and composed_operator.fits(definition, options):
            return composed_operator.traced(number, definition, dict(zip(names_of_own, args)) | keywords, options)
        if options.layout is None:
            return run(definition, call, options, ())
        named = sorted((*zip(own.parameters, args), *keywords.items()), key=itemgetter(0))
        flags = tuple([(n, x) for n, x in named if not isinstance(x, Tensor)])
        if not compiling:
            return run(definition, call, options, flags)
        if composed or not isinstance(options.layout, ShardedLayout):
            return apart(definition, call, options, flags)
        return _traced(definition, call, options, flags)

    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput
    )
    function.__doc__ = textwrap.dedent(f"    {describe.__doc__}") + definition.keywords
    function.definition = definition  # type: ignore[attr-defined]
    return function


def _of_unit_length(definition: Definition) -> Callable[..., Recurrence]:
    """The description, given q and k of unit length: it may make more of them than the rule's."""
    describe, names = definition.describe, definition.own.positional
    kinds = {n for n, a in definition.arguments.items() if a.kind in ("query", "key")}

    @functools.wraps(describe)
    def described(*args: Any, **keywords: Any) -> Recurrence:
        given = dict(zip(names, args)) | keywords
        floats = {n: x for n, x in given.items() if n in kinds and isinstance(x, Tensor) and x.is_floating_point()}
        found = describe(**given | {n: l2norm(x) for n, x in floats.items()})
        return found._replace(unit=True) if isinstance(found, Recurrence) and kinds else found

    return described


def _run(
    definition: Definition, call: functools.partial[Recurrence], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    def described() -> Recurrence:
        if transformed() and options.backend != "reference":
            refuse_transforms(_given(call, options))
        return _described(definition, call)

    found = agreed(definition.name, described, options, flags)
    r = found.r
    if options.backend == "reference":
        return _by_reference(definition, call, r, options)
    scale = definition.scale(options, r.inputs.q.shape[-1])
    if fixed(options.layout):
        return _by_block(definition, call, r, options, scale)
    out = compute(found, scale, options)
    return LinearAttentionOutput(r.read(out.o), out.final_state)


def _described(definition: Definition, call: functools.partial[Recurrence]) -> Recurrence:
    """What a description makes of a call's arguments."""
    try:
        found = call()
    except RingLAError:
        raise
    except Exception:  # before any check: of tensors that are not what the definition says, its words say more
        given = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments
        own = {n: x for n, x in given.items() if n in definition.arguments}
        check_heads(definition.arguments, own, check_arguments(definition.arguments, own))
        raise
    if not isinstance(found, Recurrence):
        raise ArgumentError(definition.name, "a description that returns a Recurrence", type(found).__name__)
    for part, kind in (("rule", Rule), ("inputs", Inputs)):
        if not isinstance(getattr(found, part), kind):
            got = type(getattr(found, part)).__name__
            raise ArgumentError(definition.name, f"a Recurrence whose {part} is of {kind.__name__}", got)
    return found


def _by_block(
    definition: Definition,
    call: functools.partial[Recurrence],
    r: Recurrence,
    options: CommonOptions,
    scale: float,
) -> LinearAttentionOutput:
    """`_run` where results must not depend on the split: what stands before and behind the recurrence, block by
    block."""
    given = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    shared = [n for n in tensors if n in definition.arguments and definition.arguments[n].shared]
    tokens = [n for n in tensors if n not in shared]
    rest = {n: x for n, x in given.items() if n not in tensors}

    whole = at_once(r.inputs.v) and definition.at_once is not None and definition.at_once(options.layout, **given)
    if whole:
        out = linear.run(whole.rule, ready(whole.inputs, options.use_qk_l2norm), scale, options)
        return LinearAttentionOutput(whole.read(out.o), out.final_state)

    def described(*x: Tensor) -> Recurrence:
        return call.func(**dict(zip((*tokens, *shared), x)), **rest)

    def before(*x: Tensor) -> tuple[Tensor, ...]:
        r = described(*x)
        return tuple(t for t in ready(r.inputs, r.made_unit(options)) if t is not None)

    def behind(o: Tensor, *x: Tensor) -> Tensor:
        return described(*x).read(o)

    alike = definition.name in ALIKE and not any(tensors[n].requires_grad for n in shared)
    if alike:
        before = by_element(before)
    own, common = [tensors[n] for n in tokens], [tensors[n] for n in shared]
    made = iter(by_block(before, *own, layout=options.layout, shared=common))
    present = {n: next(made) for n, t in r.inputs._asdict().items() if t is not None}
    inputs = r.inputs._replace(**present)
    out = linear.run(r.rule, inputs, scale, options)
    o = out.o
    if r.readout is not None:
        o = by_block(behind, o, *own, layout=options.layout, shared=common)
    return LinearAttentionOutput(o, out.final_state)


_outside_graphs = outside_graphs(_run)


def _traced(
    definition: Definition, call: functools.partial[Recurrence], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    """A split call within a compiled graph: what needs other ranks is one node, which checks when it runs. What the
    node has no arguments for breaks the graph."""
    r, layout = call(), options.layout
    beyond = options.backend == "reference" or options.in_place or options.cu_seqlens is not None
    if beyond or fixed(layout):
        return _outside_graphs(definition, call, options, flags)
    assert layout is not None
    inputs = ready(r.inputs, r.made_unit(options))
    documents = layout.num_documents if layout.packed else inputs.q.shape[0]
    own = unit(r.normalizer, options.use_qk_l2norm) or (None, None, 0.0)
    others = RecurrenceOthers(
        options.initial_state, *own, layout=layout.number, documents=documents, name=definition.name,
        rule=str(r.rule), scale=definition.scale(options, inputs.q.shape[-1]), form=options.mode,
        backend=options.backend, causal=r.causal, final=options.output_final_state, names=names_of(r),
        flags=", ".join([f"{n}={x}" for n, x in flags]),
    )  # fmt: skip
    o, final = split_recurrence(*inputs, *others)
    return LinearAttentionOutput(r.read(o), final if options.output_final_state else None)


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
    values: Any = args[0] if args else keywords.get("v", keywords.get("x"))  # q, k and v have one dtype
    final = None if out.final_state is None else out.final_state.to(state_dtype(*r.inputs))
    return LinearAttentionOutput(out.o.to(values.dtype), final)
