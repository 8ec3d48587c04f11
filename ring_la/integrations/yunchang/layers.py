"""yunchang's process groups, splits and layers."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import Group
from ...comm.agreement import Agreement
from ...errors import ArgumentError, UnsupportedError
from ...softmax.geometry import Tokens
from ...softmax.strategies import Heads, HeadSplit
from ...softmax.tensors import Tensors
from .call import Masks, UpstreamCall, checked, group_of, kernel_of, settled
from .entries import KINDS, unpack


@dataclass
class ProcessGroups:
    """The groups `set_seq_parallel_pg` has made. yunchang's layers take them from one place; so do these."""

    ULYSSES_PG: dist.ProcessGroup | None = None
    RING_PG: dist.ProcessGroup | None = None


PROCESS_GROUP = ProcessGroups()


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Make the groups of a ulysses × ring split; with `use_ulysses_low`, neighbouring ranks exchange heads."""
    degrees = {"sp_ulysses_degree": sp_ulysses_degree, "sp_ring_degree": sp_ring_degree}
    for name, n in (degrees | {"world_size": world_size}).items():
        if not isinstance(n, int) or n < 1:
            raise ArgumentError(name, "an int of at least 1", repr(n))
    degree = sp_ulysses_degree * sp_ring_degree
    if world_size % degree or world_size > dist.get_world_size():
        expected = f"a multiple of {sp_ulysses_degree} × {sp_ring_degree}, {dist.get_world_size()} at most"
        raise ArgumentError("world_size", expected, world_size)
    check_rank(rank, world_size)
    for first in range(0, world_size, degree):
        ranks = torch.arange(first, first + degree, device="cpu")
        ring_by_ulysses = ranks.view(sp_ring_degree, sp_ulysses_degree)
        if not use_ulysses_low:
            ring_by_ulysses = ranks.view(sp_ulysses_degree, sp_ring_degree).T
        for name, rows in (("ULYSSES_PG", ring_by_ulysses), ("RING_PG", ring_by_ulysses.T)):
            for members in rows.tolist():
                group = dist.new_group(members)
                if rank in members:
                    setattr(PROCESS_GROUP, name, group)


def basic_extract_local(value: Tensor, rank: int, world_size: int, *args: Any, **keywords: Any) -> Tensor:
    """This rank's part of ``value [B, T, …]``, split contiguously."""
    check_rank(rank, world_size)
    _check_parts(value, 1, world_size)
    return value.chunk(world_size, 1)[rank].detach().clone()


def zigzag_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1, *args: Any, **keywords: Any
) -> Tensor:
    """This rank's part, split in zigzag over the ring and then over the ulysses ranks."""
    ring, ulysses = _places(rd, ud)
    _check_parts(value, dim, math.lcm(2 * rd, rd * ud))
    chunks = value.chunk(2 * rd, dim)
    return torch.cat([chunks[ring], chunks[2 * rd - 1 - ring]], dim).chunk(ud, dim)[ulysses].contiguous()


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, *args: Any, **keywords: Any
) -> Tensor:
    """This rank's part, every rd-th token of the ring's, then split over the ulysses ranks."""
    ring, ulysses = _places(rd, ud)
    _check_parts(value, 1, rd * ud)
    return value[:, ring::rd].chunk(ud, 1)[ulysses].contiguous()


def _places(rd: int, ud: int) -> tuple[int, int]:
    """This rank in the ring and among the ulysses ranks, which must be as many as the caller says."""
    groups = [_process_groups().RING_PG, _process_groups().ULYSSES_PG]
    sizes = [dist.get_world_size(group) for group in groups]
    if sizes != [rd, ud]:
        raise ArgumentError("rd, ud", f"the sizes of the groups, {sizes[0]} and {sizes[1]}", f"{rd} and {ud}")
    return dist.get_rank(groups[0]), dist.get_rank(groups[1])


def check_rank(rank: object, world_size: object) -> None:
    """Refuse what is no rank of so many."""
    if not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError("world_size", "an int of at least 1", repr(world_size))
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ArgumentError("rank", f"0 to {world_size - 1}", repr(rank))


def _check_parts(value: object, dim: int, parts: int) -> None:
    """Refuse what does not split evenly, as it must here."""
    if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] % parts:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError("value", f"a tensor with a multiple of {parts} tokens in dimension {dim}", got)


EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "zigzag": zigzag_extract_local,
    "strip": stripe_extract_local,
    "basic_pytorch": basic_extract_local,
    "basic_flashinfer": basic_extract_local,
    "basic_npu": basic_extract_local,
}


def _process_groups() -> Any:
    """Ours, or those of an installed yunchang where only that has been set up."""
    if PROCESS_GROUP.RING_PG is None and PROCESS_GROUP.ULYSSES_PG is None:
        upstream = sys.modules.get("yunchang.globals")
        if upstream is not None and upstream.PROCESS_GROUP.RING_PG is not None:
            return upstream.PROCESS_GROUP
        expected = "process groups for sequence parallelism"
        raise ArgumentError("set_seq_parallel_pg", expected, "none", "Call set_seq_parallel_pg first")
    return PROCESS_GROUP


class WithGroups(nn.Module):
    """A layer that has process groups, which copies of it share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo |= {id(x): x for x in vars(self).values() if isinstance(x, dist.ProcessGroup)}
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class LongContextAttention(WithGroups):
    """Ulysses × ring attention with yunchang's interface.

    Args:
        scatter_idx, gather_idx: 2 and 1, the head and token dimensions.
        ring_impl_type: the split, a key of RING_IMPL_DICT.
        use_pack_qkv: q, k and v always travel in one message. use_sync: messages are always waited for before use.
        attn_type, attn_processor: see the module.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: object = None,
        attn_processor: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx)
        if not isinstance(ring_impl_type, str) or ring_impl_type not in KINDS:
            raise ArgumentError("ring_impl_type", f"one of {', '.join(KINDS)}", repr(ring_impl_type))
        groups = _process_groups()
        self.ring_pg, self.ulysses_pg = groups.RING_PG, groups.ULYSSES_PG
        self.scatter_idx, self.gather_idx, self.kind = scatter_idx, gather_idx, KINDS[ring_impl_type]
        self.use_pack_qkv, self.use_sync = use_pack_qkv, use_sync
        self.attn_type, self.attn_processor = attn_type, attn_processor
        kernel_of(attn_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
    ) -> Tensor:
        """Attention of this rank's tokens ``[B, T, H, D]``; as in yunchang, only the output is returned."""
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        x, groups = Tensors(query, key, value), (group_of(self.ring_pg), group_of(self.ulysses_pg))
        call = settled(groups, x.qkv, lambda: checked(self.kind, x, masks, self.attn_type, return_attn_probs))
        return attend(call, x, *groups)


def attend(
    call: UpstreamCall, x: Tensors, ring: Group, ulysses: Group, joint: tuple[Tokens, Tokens] | None = None
) -> Tensor:
    """Exchange heads over `ulysses`, walk the ring, exchange back."""
    heads = None
    if ulysses.size > 1:
        tokens = {side: [t.shape[1]] * ulysses.size for side, t in (("q", x.q), ("k", x.k))}
        split = HeadSplit(x.q.shape[2], x.k.shape[2], ulysses.size)
        heads = Heads(ulysses, split, tokens, {"q": None, "k": None})
    return call.plan(x, ring, heads, joint=joint)(x)[0]


class LongContextAttentionQKVPacked(LongContextAttention):
    """The same for ``qkv [B, T, 3, H, D]``."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: object = None,
    ) -> None:
        if scatter_idx != 3:
            raise UnsupportedError("scatter_idx", "3, the head dimension of qkv", scatter_idx)
        super().__init__(2, gather_idx, ring_impl_type, True, use_sync, attn_type)

    def forward(self, qkv: Tensor, *args: Any, **keywords: Any) -> Tensor:  # type: ignore[override]
        """Attention of this rank's tokens; the other arguments are those of LongContextAttention."""
        groups = group_of(self.ring_pg), group_of(self.ulysses_pg)
        q, k, v = unpack("qkv", qkv, 2, 3, groups)
        return super().forward(q, k, v, *args, **keywords)


class AsyncLongContextAttention(LongContextAttention):
    """The same with fewer arguments: messages are always posted before they are waited for."""

    def __init__(self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic") -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type)


class UlyssesAttention(WithGroups):
    """Ulysses attention with yunchang's interface: each rank computes its heads of the whole sequence, alone."""

    def __init__(
        self,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: object = None,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx)
        self.spg, self.scatter_idx, self.gather_idx = sequence_process_group, scatter_idx, gather_idx
        self.use_sync, self.attn_type = use_sync, attn_type
        kernel_of(attn_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
    ) -> Tensor:
        """Attention of this rank's tokens ``[B, T, H, D]``."""
        masks = Masks(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        x, group = Tensors(query, key, value), group_of(self.spg)
        call = settled([group], x.qkv, lambda: checked("contiguous", x, masks, self.attn_type, return_attn_probs))
        return attend(call, x, Alone(group.agreement), group)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Alone:
    """A ring of one rank: nothing is sent. `agreement` is that of the group that heads are exchanged in."""

    agreement: Agreement
    size, rank, copies = 1, 0, False


def _check_dims(scatter_idx: int, gather_idx: int) -> None:
    if (scatter_idx, gather_idx) != (2, 1):
        raise UnsupportedError(
            "scatter_idx, gather_idx", "2 and 1: tensors are [B, T, H, D]", (scatter_idx, gather_idx)
        )
