"""A described call: what all ranks check and agree on before anything is sent, and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import linear
from ..blockwise import repeated
from ..checks import offsets_are_read
from ..comm import Entry
from ..context import ShardedLayout
from ..errors import RingLAError
from ..kernels import Inputs, KnownCall
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from .agreement import Flags, agree, known
from .bidirectional import bidirectional
from .checks import check
from .definition import CommonOptions, Normalizer, Recurrence


class AgreedCall(NamedTuple):
    """A call that was checked: what its description gives, its decays where the host knows them, and what is known of
    such calls, if that is kept."""

    r: Recurrence
    decays: tuple[float, ...] | None = None
    known: KnownCall | None = None


def agreed(name: str, describe: Callable[[], Recurrence], options: CommonOptions, flags: Flags) -> AgreedCall:
    """What `describe` gives, checked; an error of one rank is raised on all."""
    layout = options.layout
    if isinstance(layout, ShardedLayout):
        return _compared(name, describe, options, flags, layout)
    r = describe()
    known = layout is None and not offsets_are_read(options.cu_seqlens)
    if not known or torch.compiler.is_compiling():  # a graph is for all lengths
        check(r, options)
        return AgreedCall(r)
    try:
        kind = (name, *_shapes(r, options))
        found = _checked.get(kind)
        if found is not None:
            return AgreedCall(r, None, found)
    except (AttributeError, TypeError):  # what is no tensor, or cannot be a key
        kind = None
    check(r, options)
    if kind is None:
        return AgreedCall(r)
    if len(_checked) >= MOST_CHECKED:
        _checked.clear()
    return AgreedCall(r, None, _checked.setdefault(kind, KnownCall()))


class SeenCalls(dict[Hashable, tuple[Entry | None, KnownCall]]):
    """What `layout.again` takes, by the kind of call that ranks have compared, and what else is known of such calls."""


def _compared(
    name: str, describe: Callable[[], Recurrence], options: CommonOptions, flags: Flags, layout: ShardedLayout
) -> AgreedCall:
    """`agreed` on a split sequence. A call like one before is neither checked nor waited for."""
    seen = layout.kept(SeenCalls, SeenCalls, name)
    try:
        r = describe()
        kind = _kind(r, options, flags, layout)
        again = kind in seen
        if not again:
            check(r, options)
    except RingLAError as error:
        layout.agree(name, None, error)  # raises, on every rank
        raise
    if again:
        entry, before = seen[kind]
        layout.again(entry)
        return AgreedCall(r, known(r.decays, layout), before)
    decays, entry = agree(name, r, options, flags)
    if kind is None:
        return AgreedCall(r, decays)
    seen[kind] = entry, KnownCall()
    return AgreedCall(r, decays, seen[kind][1])


MOST_CHECKED = 1024
_checked: dict[tuple, KnownCall] = {}
"""Kinds of calls on one device that were checked before: shapes, dtypes and flags, no tensors."""


def _kind(r: Recurrence, options: CommonOptions, flags: Flags, layout: ShardedLayout) -> tuple | None:
    """All that checks and the ranks' comparison of a split call depend on; None where that is more: values, static
    decays that the host knows, and what no check has seen to be a tensor."""
    if layout.cp.validate == "always" or options.cu_seqlens is not None:
        return None
    if r.decays is not None:
        return None
    try:
        kind = (*_shapes(r, options), flags)
        hash(kind)
    except (AttributeError, TypeError):  # what is no tensor, or cannot be a key
        return None
    return kind


def _shapes(r: Recurrence, options: CommonOptions) -> list:
    """What checks look at."""
    given = *r.inputs, options.initial_state, options.cu_seqlens, *(() if r.normalizer is None else r.normalizer[:2])
    found: list = [x if x is None else (x.shape, x.dtype, x.device, x.requires_grad, x.layout) for x in given]
    scale, _, final, unit_length, _, _, *rest = options
    found += r.rule, r.causal, scale, final, unit_length, *rest, torch.is_grad_enabled()
    return found


def compute(call: AgreedCall, scale: float, options: CommonOptions) -> LinearAttentionOutput:
    """``scale · Sᵀ q`` and the final states."""
    r, decays, known = call
    inputs = ready(r.inputs, r.made_unit(options))
    if r.causal:
        return linear.run(r.rule, inputs, scale, options, decays, known)
    return bidirectional(inputs, scale, options, unit(r.normalizer, options.use_qk_l2norm))


def ready(x: Inputs, unit_length: bool) -> Inputs:
    """What kernels take: q and k of unit length where that is asked for, and gates and the like that come with the
    heads of q and k repeated for the value heads they serve."""
    heads = x.v.shape[2]
    if not unit_length and x.q.shape[2] == heads:
        return x

    def own(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[2] == heads else repeated(t, heads // t.shape[2])

    q, k = (l2norm(x.q), l2norm(x.k)) if unit_length else (x.q, x.k)
    return Inputs(q, k, x.v, *map(own, x[3:]))


def unit(normalizer: Normalizer | None, unit_length: bool) -> Normalizer | None:
    """A denominator, its q and k of unit length where that is asked for."""
    if normalizer is None or not unit_length:
        return normalizer
    return Normalizer(l2norm(normalizer.q), l2norm(normalizer.k), normalizer.eps)
