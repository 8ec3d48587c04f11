"""What a block is given, cut to this rank's tokens. torch.compile traces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .call import DenoiserCall
from .compare import mapped, tensors_in
from .keys import GivenMask
from .plans import IMAGE, BlockPlan, KeyMask, Role, SliceCount, SliceRows, TokenRows
from .processors import EveryKey


def cut(
    call: DenoiserCall, name: str, spec: BlockPlan, positional: tuple[str, ...], given: dict[str, Any], keep: bool
) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments, those of `positional` and the rest, with this rank's tokens of what is whole."""
    for argument, role in spec.arguments.items():
        x = given.get(argument)
        if isinstance(role, KeyMask):
            call.masked = None if x is None else GivenMask(f"{name}: {argument}", x, role.streams)
            if argument in given:
                given[argument] = EveryKey() if role.read else None
        elif x is not None and role is not None:
            given[argument] = part_of(call, f"{name}: {argument}", x, role, keep)
    return tuple([given.pop(n) for n in positional]), given


def start(call: DenoiserCall, spec: BlockPlan, given: Mapping[str, Any]) -> None:
    """Before the first block of a call: how many tokens there are."""
    sizes, residual = sizes_of(call, spec, given), call.residual
    if residual is not None and residual[1] != sizes.get("image"):
        raise ArgumentError(residual[0], f"{sizes.get('image')} tokens, as the image has", residual[1])
    call.streams.sizes |= sizes
    call.started = True


def sizes_of(call: DenoiserCall, spec: BlockPlan, given: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens of each stream a block is given."""
    sizes: dict[str, int] = {}
    ranks = call.streams.ranks
    for argument, role in spec.arguments.items():
        if isinstance(role, TokenRows) and len(role.streams) == 1 and role.streams[0] not in sizes:
            tokens, stream = given[argument].shape[role.dim], role.streams[0]
            if tokens < ranks:  # processors slice by lengths, which at 0 is another slice
                expected = f"at least {ranks} tokens of {stream}, one for each rank"
                raise ArgumentError(argument, expected, tokens)
            sizes[stream] = tokens
    return sizes


def part_of(call: DenoiserCall, name: str, x: Any, role: Role, keep: bool = False) -> Any:
    """This rank's tokens of an argument; with `keep` those of whole rows are cut once a call."""
    if role is None or x is None:
        return x
    if isinstance(role, tuple):
        if not isinstance(x, (tuple, list)) or len(x) != len(role):
            raise ArgumentError(name, f"{len(role)} tensors", type(x).__name__)
        return type(x)([part_of(call, name, one, part, keep) for one, part in zip(x, role)])
    streams = call.streams
    if isinstance(role, SliceCount):
        return call.grid.local_shape[0]  # type: ignore[union-attr]
    if isinstance(role, SliceRows):
        return call.grid.slices.shard(x, role.dim)  # type: ignore[union-attr]
    if isinstance(role, TokenRows):
        if not keep or torch.compiler.is_compiling() or x.requires_grad:
            return streams.shard(name, x, role.streams, role.dim)
        return _kept_rows(call, name, x, role)
    if role.flat:  # type: ignore[union-attr]
        rows = x.unflatten(0, (call.batch, -1))
        return x if rows.shape[1] == 1 else streams.shard(name, rows, (role.stream,), 1).flatten(0, 1)  # type: ignore[union-attr]
    return streams.shard(name, x, (role.stream,), 1) if x.dim() == role.dims and x.shape[1] > 1 else x  # type: ignore[union-attr]


def _kept_rows(call: DenoiserCall, name: str, x: Tensor, role: TokenRows) -> Tensor:
    """This rank's rows of what all blocks are given (rotary embeddings)."""
    parts, key = call.parts, (id(x), role)
    if key not in parts or parts[key][0] is not x:
        part = call.streams.shard(name, x, role.streams, role.dim)
        if part is x:
            return x
        parts[key] = x, part
    return parts[key][1]


def residuals(call: DenoiserCall, name: str, given: Any) -> Any:
    """This rank's tokens of what is added between blocks, which the first block compares with its own."""
    for x in tensors_in(given):
        if x.dim() != 3 or (call.residual or (name, x.shape[1]))[1] != x.shape[1]:
            raise ArgumentError(name, "tensors [B, tokens, channels] with the same number of tokens", list(x.shape))
        call.residual = name, x.shape[1]
        call.streams.sizes["image"] = x.shape[1]
    return mapped(given, lambda x: call.streams.shard(name, x, IMAGE, 1))
