"""fla-core's contexts: the layout each stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError, RingLAError, describe_tensor
from ...layout import check_cu_seqlens

T = TypeVar("T")

_contexts: WeakKeyDictionary[dist.ProcessGroup, ContextParallel] = WeakKeyDictionary()


def layout_of(cp_context: Any) -> ShardedLayout:
    """The layout that a context of fla-core stands for. Collective the first time, and where its offsets are others.

    Raises:
        ArgumentError: it is no such context, or of a group of which this rank is none; on every rank of its group.
    """
    group = getattr(cp_context, "group", None)
    kind: Any = getattr(cp_context, "layout", None)
    if not isinstance(group, dist.ProcessGroup) or not hasattr(cp_context, "__dict__"):
        got = f"{type(cp_context).__name__}, of group {type(group).__name__}"
        raise ArgumentError("cp_context", "one of fla-core's build_cp_context, with a group", got)
    offsets = cp_context.cu_seqlens if cp_context.cu_seqlens_cpu is None else cp_context.cu_seqlens_cpu
    known, of, version = vars(cp_context).get("_ring_la_layout", (None, None, None))
    if known is not None and offsets is of and offsets._version == version:
        return known
    if group not in _contexts:
        _contexts[group] = ContextParallel(group)
    cp = _contexts[group]
    begins, length = _told(cp, cp_context, offsets)
    layout = cp.layout(cp.size * length, kind, None if begins == [0] else [*begins, cp.size * length])
    cp_context._ring_la_layout = layout, offsets, offsets._version
    return layout


def _told(cp: ContextParallel, context: Any, offsets: Any) -> tuple[list[int], int]:
    """Where all ranks' documents begin, and this rank's tokens. What one rank refuses all refuse."""
    error: ArgumentError | None = None
    try:
        _check_context(context, offsets)
        said: Any = _begins(context, offsets.tolist(), cp.rank, cp.size)
    except ArgumentError as e:
        error, said = e, f"rank {cp.rank}: {e}"
    told = [json.loads(x) for x in cp.comm.agreement.tell(json.dumps(said))]
    if error is not None:
        raise error
    for other in told:
        if isinstance(other, str):
            raise ArgumentError("cp_context", "one of fla-core's build_cp_context on every rank", other)
    return sorted({place for said in told for place in said}), int(offsets[-1])


def _check_context(context: Any, offsets: Any) -> None:
    """Refuse what `build_cp_context` does not make."""
    if context.layout not in ("contiguous", "zigzag"):
        raise ArgumentError("cp_context", "a layout 'contiguous' or 'zigzag'", repr(context.layout))
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or not len(offsets) or not int(offsets[-1]):
        raise ArgumentError("cp_context", "cu_seqlens [N+1] of at least one token", describe_tensor(offsets))
    length = check_cu_seqlens(offsets, int(offsets[-1]), "cp_context")[-1]
    before: Any = [getattr(context, "pre_num_conv_tokens", None)]
    if context.layout == "zigzag":
        part, before = (getattr(context, name, None) for name in ("part_len", "pre_num_conv_tokens_by_part"))
        if part is None or 2 * part != length:
            raise ArgumentError("cp_context", f"part_len of half its {length} tokens", part)
    if not isinstance(before, (tuple, list)) or not all(isinstance(n, int) for n in before):
        raise ArgumentError("cp_context", "how many tokens of a document stand before each part", before)


def _begins(context: Any, offsets: list[int], rank: int, size: int) -> list[int]:
    """Where documents begin in the whole sequence, of those that begin on this rank."""
    if context.layout == "contiguous":
        parts = [(rank, 0, offsets[-1], context.pre_num_conv_tokens)]
    else:
        half = context.part_len
        before = context.pre_num_conv_tokens_by_part
        parts = [(rank, 0, half, before[0]), (2 * size - 1 - rank, half, 2 * half, before[1])]
    found = []
    for part, first, end, earlier in parts:
        here = [offset for offset in offsets if first < offset < end] + ([] if earlier else [first])
        found += [part * (end - first) + offset - first for offset in here]
    return found


def together(name: str, context: Any, prepare: Callable[[], T]) -> tuple[ShardedLayout | None, T]:
    """The layout of a context, and what `prepare` makes of a call's arguments. What one rank refuses all do, who come
    to ring_la's function `name`."""
    layout = None if context is None else layout_of(context)
    try:
        return layout, prepare()
    except RingLAError as error:
        if layout is not None:
            layout.agree(name, None, error)
        raise
