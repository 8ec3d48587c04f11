"""All-gather (LASP-2, arXiv 2502.07563; also FLA's context parallelism): every rank gets every link's (A, b)
and folds what precedes its own links. A rank receives (P−1)(S+M) bytes, in one collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..algebra import Affine, transition_shape
from ..comm import Group, Pending
from .chain import Chain
from .strategy import Cost, Link, Messages, fold, sizes


class AllGather:
    name = "all_gather"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        received = (chain.ranks - 1) * chain.slots() * sum(sizes(like))
        return Cost(received, (Messages("gather", received),), chain.folds)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Pending:
        payload = pack([link.map for link in links], chain.slots(), like)
        pending = group.all_gather(payload)

        def finish() -> list[Tensor | None]:
            rows = pending.wait()
            maps = {}
            for rank in range(group.size):
                for slot, i in enumerate(chain.local(rank)):
                    maps[i] = unpack(rows[rank, slot], like)
            return [fold(chain, maps, i) for i in chain.local(group.rank)]

        return Pending(finish)


def pack(maps: Sequence[Affine], slots: int, like: Affine) -> Tensor:
    """The maps as rows of one tensor ``[slots, S+M]``; ranks with fewer links pad with zero rows."""
    shape = transition_shape(like.kind, like.b.shape)
    width = like.b.numel() + (shape.numel() if shape is not None else 0)
    out = like.b.new_zeros(slots, width)
    for row, m in zip(out, maps):
        row[: m.b.numel()] = m.b.flatten()
        if m.A is not None:
            row[m.b.numel() :] = m.A.flatten()
    return out


def unpack(row: Tensor, like: Affine) -> Affine:
    """The map in a row, shaped as `like`."""
    n, shape = like.b.numel(), transition_shape(like.kind, like.b.shape)
    return Affine(like.kind, None if shape is None else row[n:].view(shape), row[:n].view(like.b.shape))
