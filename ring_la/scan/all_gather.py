"""All-gather (LASP-2, arXiv 2502.07563; also FLA's context parallelism): every rank gets every link's (A, b)
and folds what precedes its own links. A rank receives (P−1)(S+M) bytes, in one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine, transition_shape
from ..comm import Group, Pending
from .chain import Chain
from .strategy import Cost, Link, Messages, Steps, fold, sizes


class AllGather:
    name = "all_gather"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        if not any(chain.needs):
            return Cost()
        received = (chain.ranks - 1) * chain.slots() * sum(sizes(like))
        applied = max(chain.applied(chain.local(rank)) for rank in set(chain.owners))
        copied = chain.slots() * sum(sizes(like))
        return Cost(received, (Messages("gather", received),), applied, 0, copied, 1, 2 + applied)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Pending:
        result: list[Tensor | None] = [None] * len(links)
        return Steps(self._steps(chain, links, like, group, result), result, links, group)

    @staticmethod
    def _steps(
        chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None]
    ) -> Iterator[None]:
        if not any(chain.needs):
            return
        pending = group.all_gather(pack([link.map for link in links], chain.slots(), like))
        yield
        maps = unpack(pending.wait().flatten(0, 1), like)
        result[:] = fold(chain, [maps[row] for row in chain.rows], chain.local(group.rank))


def pack(maps: Sequence[Affine], slots: int, like: Affine) -> Tensor:
    """The maps as rows of one tensor ``[slots, S+M]``; ranks with fewer links pad with zero rows."""
    shape = transition_shape(like.kind, like.b.shape)
    state, transition = like.b.numel(), shape.numel() if shape is not None else 0
    parts = []
    for m in maps:
        parts.append(m.b.reshape(-1))
        if transition:
            parts.append(like.b.new_zeros(transition) if m.A is None else m.A.reshape(-1))
    if len(maps) < slots:
        parts.append(like.b.new_zeros((slots - len(maps)) * (state + transition)))
    return torch.cat(parts).view(slots, state + transition)


def unpack(rows: Tensor, like: Affine) -> list[Affine]:
    """The maps in rows ``[n, S+M]``, each shaped as `like`."""
    shape, count = transition_shape(like.kind, like.b.shape), len(rows)
    state = like.b.numel()
    b = rows[:, :state].view(count, *like.b.shape).unbind(0)
    A = [None] * count if shape is None else rows[:, state:].view(count, *shape).unbind(0)
    return [Affine(like.kind, *m) for m in zip(A, b)]
