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
from .plans import IMAGE, BlockPlan, KeyMask, Role, SliceCount, SliceRows, TokenCount, TokenRows
from .processors import EveryKey


def cut(
    call: DenoiserCall, name: str, spec: BlockPlan, positional: tuple[str, ...], given: dict[str, Any], keep: bool
) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments, those of `positional` and the rest, with this rank's tokens of what is whole."""
    for argument, role in spec.arguments.items():
        x = given.get(argument)
        if isinstance(role, KeyMask):
            left = take_mask(call, f"{name}: {argument}", role, x)
            if argument in given:
                given[argument] = left
        elif x is not None and role is not None:
            given[argument] = part_of(call, f"{name}: {argument}", x, role, keep)
    return tuple([given.pop(n) for n in positional]), given


def take_mask(call: DenoiserCall, where: str, role: KeyMask, x: Any) -> Any:
    """Note the mask of a block's argument in the call; what the block gets for it."""
    mask = x if role.within is None else (x or {}).get(role.within)
    if mask is not None and mask.is_floating_point() and not role.raises:
        raise ArgumentError(where, "bool or int, the same for every query", mask.dtype)
    call.masked = None if mask is None else GivenMask(where, mask, role.streams)
    if role.within is None:
        return EveryKey() if role.read else None
    return x and {n: one for n, one in x.items() if n != role.within}


def start(call: DenoiserCall, spec: BlockPlan, given: Mapping[str, Any]) -> None:
    """Before the first block of a call, or the first with another stream: how many tokens there are."""
    known = tuple(call.streams.sizes) if call.started else tuple(call.streams.ahead)
    sizes, residual = sizes_of(call, spec, given, known), call.residual
    if not call.started and residual is not None and residual[1] != sizes.get("image"):
        raise ArgumentError(residual[0], f"{sizes.get('image')} tokens, as the image has", residual[1])
    call.streams.note(sizes)
    call.started = True


def sizes_of(
    call: DenoiserCall, spec: BlockPlan, given: Mapping[str, Any], known: tuple[str, ...] = ()
) -> dict[str, int]:
    """How many tokens of each stream a block is given, but of the `known` ones."""
    sizes: dict[str, int] = {}
    there = {n: x for n, x in given.items() if x is not None}
    told = [(n, stream, there[n].shape[dim]) for n, stream, dim in whole_streams(spec) if n in there]
    told += [(n, r.stream, there[n]) for n, r in spec.arguments.items() if isinstance(r, TokenCount) and n in there]
    for argument, stream, tokens in told:
        if stream not in sizes and stream not in known:
            sizes[stream] = enough(call, argument, stream, tokens)
    for argument, role in spec.arguments.items():
        if isinstance(role, TokenRows) and argument in there:
            left = [s for s in role.streams if s not in sizes and s not in known]
            if len(left) == 1:
                others = sum((call.streams.sizes | sizes)[s] for s in role.streams if s != left[0])
                sizes[left[0]] = there[argument].shape[role.dim] - others
    return sizes


def whole_streams(spec: BlockPlan) -> list[tuple[str, str, int]]:
    """Arguments that have the tokens of one stream: their names, the stream, and along which dimension."""
    rows = [(name, role) for name, role in spec.arguments.items() if isinstance(role, TokenRows)]
    return [(name, role.streams[0], role.dim) for name, role in rows if len(role.streams) == 1]


def enough(call: DenoiserCall, name: str, stream: str, tokens: int) -> int:
    """So many tokens of a stream, refused if ranks would have none: processors slice by lengths, which at 0 is another
    slice."""
    if tokens < call.streams.ranks:
        expected = f"at least {call.streams.ranks} tokens of {stream}, one for each rank"
        raise ArgumentError(name, expected, tokens)
    return tokens


def ahead(call: DenoiserCall, name: str, role: TokenRows, x: Tensor) -> None:
    """Note a stream that a module before the blocks cuts, so that no block gets it whole."""
    (stream,), tokens, streams = role.streams, x.shape[role.dim], call.streams
    if stream in streams.ahead and streams.sizes[stream] != tokens:
        raise ArgumentError(name, f"{streams.sizes[stream]} tokens of {stream}, as before in this call", tokens)
    streams.note({stream: enough(call, name, stream, tokens)})
    streams.ahead.add(stream)


def part_of(call: DenoiserCall, name: str, x: Any, role: Role, keep: bool = False) -> Any:
    """This rank's tokens of an argument; with `keep` those of whole rows are cut once a call."""
    if role is None or x is None:
        return x
    if isinstance(role, tuple):
        if not isinstance(x, (tuple, list)) or len(x) != len(role):
            raise ArgumentError(name, f"{len(role)} tensors", type(x).__name__)
        return type(x)([part_of(call, name, one, part, keep) for one, part in zip(x, role)])
    if isinstance(role, dict):
        return {key: part_of(call, name, x[key], part, keep) for key, part in role.items()}
    streams = call.streams
    if isinstance(role, TokenCount):
        return streams.local(role.stream)
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
        call.streams.note({"image": x.shape[1]})
    return mapped(given, lambda x: call.streams.shard(name, x, IMAGE, 1))
