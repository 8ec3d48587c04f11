"""Recurrences made of others: several scans, shifts and sums over tokens, each public and split by itself.

A description with a keyword `options` is the whole call. Before it runs, its arguments are checked by their shapes and
compared among the ranks here, so that errors carry the caller's names; it gets `options` with the scale as a number and
q and k of unit length where that is asked for. `options.inner` and `options.scan` are the keywords that its parts take.
What it does to each token by itself goes through `blockwise.by_block`, so that its parts can keep their bits.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import full_precision, refuse_transforms, transformed
from ..blockwise import by_block, fixed
from ..checks import check_flag, check_nan, check_scale, check_split
from ..context import ShardedLayout
from ..errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor
from ..kernels import check_choice
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from .agreement import Flags
from .arguments import Argument, check_arguments, state_dtype_of
from .definition import CommonOptions, Definition


class Checked(NamedTuple):
    """What is known of calls of one kind: their sizes by letter, and whether arguments come as the description takes
    them."""

    sizes: Mapping[str, int]
    plain: bool


MOST_CHECKED = 1024
_checked: dict[Hashable, Checked] = {}
"""Kinds of calls on one device that were checked before: shapes, dtypes and flags, no tensors."""


def run_composed(
    definition: Definition, call: functools.partial[Any], options: CommonOptions, flags: Flags
) -> LinearAttentionOutput:
    """Check a call, let the ranks agree on it, and make it."""
    own = definition.own
    given = own.given(call)
    tensors = {n: given[n] for n in definition.arguments if given[n] is not None or n not in own.optional}
    kind = _kind(definition, options, tensors)
    checked = None if kind is None else _checked.get(kind)
    if checked is None:
        checked = _agreed(definition, options, flags, tensors)
        if kind is not None:
            if len(_checked) >= MOST_CHECKED:
                _checked.clear()
            _checked[kind] = checked
    if options.backend == "reference":
        return _by_reference(definition, call, options, tensors)
    sizes = checked.sizes
    if not checked.plain:
        given |= {n: _ready(x, definition.arguments[n], sizes, options) for n, x in tensors.items()}
    wide, wanted = state_dtype_of(tensors), options.output_final_state or options.in_place
    before = _as_states(options.initial_state, wide)
    ready = options._replace(scale=definition.scale(options, sizes.get("K", 1)), use_qk_l2norm=False, in_place=False)
    with full_precision(*tensors.values()):
        o, final = call.func(**given, options=ready._replace(initial_state=before, output_final_state=wanted))
    if not options.in_place:
        return LinearAttentionOutput(o, _as_states(final, wide))
    for part, new in zip(parts_of(options.initial_state), parts_of(final)):
        part.copy_(new)
    return LinearAttentionOutput(o, options.initial_state)


def _as_states(state: Any, wide: torch.dtype) -> Any:
    """A state in the dtype of states."""
    if isinstance(state, tuple):
        return tuple([part.to(wide) for part in state])
    return None if state is None else state.to(wide)


def _kind(definition: Definition, options: CommonOptions, tensors: Mapping[str, Tensor]) -> Hashable | None:
    """All that the checks of a call on one device depend on; None where that is more."""
    if options.layout is not None or options.cu_seqlens is not None or torch.compiler.is_compiling() or transformed():
        return None
    try:
        state = options.initial_state
        parts = None if state is None else tuple([(x.shape, x.dtype, x.requires_grad) for x in parts_of(state)])
        own = [(n, x.shape, x.dtype, x.device, x.requires_grad) for n, x in tensors.items()]
        flags = options.scale, *options[2:]  # and their types: True is no 1
        kind = (definition.describe, *own, type(state), parts, flags, *map(type, flags), torch.is_grad_enabled())
        hash(kind)
    except (AttributeError, TypeError):  # what is no tensor, or cannot be a key
        return None
    return kind


def _agreed(
    definition: Definition, options: CommonOptions, flags: Flags, tensors: Mapping[str, Tensor]
) -> Checked:  # fmt: skip
    """A call's sizes, after its checks; an error of one rank is raised on all."""
    layout, error, sizes = options.layout, None, {}
    try:
        if transformed() and options.backend != "reference":
            refuse_transforms((*tensors.items(), ("initial_state", None)))
        sizes = check_arguments(definition.arguments, tensors)
        if definition.check is not None:
            definition.check(sizes)
        _check(definition, options, sizes, tensors)
    except RingLAError as e:
        error = e
    if isinstance(layout, ShardedLayout):
        layout.agree(definition.name, None if error else _signature(definition, options, flags, tensors), error)
    elif error is not None:
        raise error
    return Checked(sizes, not any(_lacks(x, definition.arguments[n], sizes, options) for n, x in tensors.items()))


def _lacks(x: Tensor, kind: Argument, sizes: Mapping[str, int], options: CommonOptions) -> bool:
    """Whether an argument is not yet as the call's description takes it."""
    unit = options.use_qk_l2norm and kind.kind in ("query", "key")
    return unit or ("H" in kind.shape and x.shape[kind.shape.index("H")] != sizes["H"])


def _ready(x: Tensor, kind: Argument, sizes: Mapping[str, int], options: CommonOptions) -> Tensor:
    """An argument as the call's description takes it: q and k of unit length if that is asked for, value heads written
    out."""
    if options.use_qk_l2norm and kind.kind in ("query", "key"):
        x = by_block(l2norm, x, layout=options.layout)
    if "H" not in kind.shape or x.shape[kind.shape.index("H")] == sizes["H"]:
        return x
    return by_block(lambda x: _to_heads(x, kind.shape, sizes), x, layout=options.layout)


def _to_heads(x: Tensor, shape: str, sizes: Mapping[str, int]) -> Tensor:
    """A tensor of value heads that came with the heads of keys."""
    dim = shape.index("H")
    return x.repeat_interleave(sizes["H"] // x.shape[dim], dim)


def _check(
    definition: Definition, options: CommonOptions, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse wrong keywords, and a state of another form."""
    check_choice(options.mode, options.backend)
    for name in ("use_qk_l2norm", "output_final_state", "in_place"):
        check_flag(name, getattr(options, name))
    check_scale(options.scale)
    if fixed(options.layout) and not definition.same_bits:
        expected = f"one without deterministic=True for {definition.name}"
        raise UnsupportedError("layout", expected, "a deterministic one")
    first = next(n for n, a in definition.arguments.items() if not a.shared)
    x = tensors[first]
    documents = check_split(x.shape[1], x.shape[0], options.layout, options.cu_seqlens, x.device, first)
    if options.layout is not None and options.backend == "reference":
        raise UnsupportedError("backend", "None, 'triton' or 'torch' with a layout", "'reference'")
    if options.initial_state is not None:
        shapes = [[documents, *(sizes[letter] for letter in part)] for part in definition.states]
        parts = parts_of(options.initial_state)
        if not all(isinstance(p, Tensor) for p in parts) or [list(p.shape) for p in parts] != shapes:
            form = str(shapes[0]) if len(shapes) == 1 else f"a tuple of tensors {shapes}"
            got = [list(p.shape) if isinstance(p, Tensor) else describe_tensor(p) for p in parts]
            raise ArgumentError("initial_state", form, got)
    if options.in_place:
        _check_in_place(options, tensors)
    if options.layout is not None and options.layout.cp.validate == "always":
        for n, t in tensors.items():
            check_nan(n, t.detach())


def _check_in_place(options: CommonOptions, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to overwrite a state that is missing, shared between ranks, of another dtype, or part of a graph."""
    parts, wanted = parts_of(options.initial_state), state_dtype_of(tensors)
    if options.backend == "reference" or options.layout is not None:
        raise UnsupportedError("in_place", "False under a layout and for backend='reference'", True)
    if options.initial_state is None or any(p.dtype != wanted for p in parts):
        raise ArgumentError("initial_state", f"a state of {wanted} for in_place=True", options.initial_state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors.values(), *parts)):
        raise ArgumentError("in_place", "False where gradients are wanted", True, "Call it under torch.no_grad()")


def parts_of(state: Any) -> tuple[Any, ...]:
    """The tensors of a state."""
    return state if isinstance(state, tuple) else (state,)


def _signature(
    definition: Definition, options: CommonOptions, flags: Flags, tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name."""
    state = options.initial_state
    facts = [(n, Facts.of(x, None if definition.arguments[n].shared else 1)) for n, x in tensors.items()]
    return (
        *facts,
        ("initial_state", None if state is None else tuple(map(Facts.of, parts_of(state)))),
        *[(n, getattr(options, n)) for n in ("scale", "use_qk_l2norm", "output_final_state", "mode", "backend")],
        ("gradients", torch.is_grad_enabled()),
        *flags,
    )


def _by_reference(
    definition: Definition, call: functools.partial[Any], options: CommonOptions, tensors: Mapping[str, Tensor]
) -> LinearAttentionOutput:
    """The fp64 token loop, in the dtypes of the other backends."""
    if definition.reference is None:
        expected = f"None, 'triton' or 'torch' for {definition.name}"
        raise UnsupportedError("backend", expected, "'reference'", "It is defined without one")
    common = {k: x for k, x in options._asdict().items() if k != "in_place"}
    o, final = definition.reference(*call.args, **call.keywords, **common)
    wide = state_dtype_of(tensors)
    parts = None if final is None else tuple(p.to(wide) for p in parts_of(final))
    values = next(x for n, x in tensors.items() if definition.arguments[n].values)
    state: Any = parts[0] if parts is not None and len(parts) == 1 else parts
    return LinearAttentionOutput(o.to(values.dtype), state)
