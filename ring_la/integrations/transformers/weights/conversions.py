"""Transformers' own conversions between the names and shapes of files and those of a model, on sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def mixed(
    model: PreTrainedModel, mapping: list[Any], there: Mapping[str, Any]
) -> dict[str, tuple[WeightConverter, dict[str, str]]]:
    """Sharded parameters whose conversion needs more than a rank's own slices, and the names it takes with their
    patterns."""
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    out: dict[str, tuple[WeightConverter, dict[str, str]]] = {}
    for name in sorted(there, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        p = state.get(target)
        if pattern is None or not isinstance(p, DTensor) or _by_slices(by_pattern[pattern], p):
            continue
        out.setdefault(target, (by_pattern[pattern], {}))[1][name] = pattern
    return out


def _by_slices(converter: WeightConverter, p: DTensor) -> bool:
    """Whether a rank's shard is the conversion of its own slices: experts stacked along the sharded dimension."""
    shards = [(p.device_mesh.size(i), x.dim) for i, x in enumerate(p.placements) if isinstance(x, Shard)]
    if not shards:
        return True
    stacked = isinstance(converter.operations[0], MergeModulelist) and converter.operations[0].dim == 0
    rest = all(isinstance(op, Concatenate) and op.dim > 0 for op in converter.operations[1:])
    return stacked and rest and all(dim == 0 and p.shape[0] >= ranks for ranks, dim in shards) and _all_have(p)


def _all_have(p: DTensor) -> bool:
    """Whether every rank has a row of it: chunks are of one size, so the last ranks may have none."""
    ranks = p.device_mesh.size(len(p.placements) - 1)
    return -(-p.shape[0] // ranks) * (ranks - 1) < p.shape[0]


def converted(
    model: PreTrainedModel, name: str, converter: WeightConverter, there: Mapping[str, Any], sources: dict[str, str]
) -> dict[str, Tensor]:
    """The whole of what one conversion makes of its sources."""
    own = deepcopy(converter)
    for source, pattern in sources.items():
        own.add_tensor(name, source, pattern, there[source][...])
    found = own.convert(name, model=model, config=model.config)
    return {n: x[0] if isinstance(x, list) else x for n, x in found.items()}


def as_stored(model: PreTrainedModel, group: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the shapes of files."""
    with own_classes(model):
        return revert_weight_conversion(model, group)


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Models without the class FSDP2 gave them, which the library takes for somebody's own, without conversions."""
    changed: list[Any] = [m for m in model.modules() if isinstance(m, PreTrainedModel) and isinstance(m, FSDPModule)]
    classes = [type(m) for m in changed]
    try:
        for m in changed:
            m.__class__ = next(c for c in type(m).__mro__ if not issubclass(c, FSDPModule))
        yield
    finally:
        for m, kind in zip(changed, classes):
            m.__class__ = kind
