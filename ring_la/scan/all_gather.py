"""All-gather (LASP-2, arXiv 2502.07563; also FLA's context parallelism): every rank gets every link's (A, b)
and folds what precedes its own links. A rank receives (P−1)(S+M) bytes, in one collective; backward (P−1)S, for
it keeps the transitions it will fold with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine, transition_shape, transpose
from ..comm import Group
from .chain import Chain
from .strategy import Cost, Link, Messages, Stepped, applying, fold, sizes


class AllGather(Stepped):
    name = "all_gather"

    def cost(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain, like, sum(sizes(like)))

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        return self._cost(chain.reversed, like, sizes(like)[0])

    @staticmethod
    def _cost(chain: Chain, like: Affine, size: int) -> Cost:
        """`size` bytes of each link are sent."""
        if not any(chain.needs):
            return Cost()
        received = (chain.ranks - 1) * chain.slots() * size
        applied = max(chain.applied(chain.local(rank)) for rank in set(chain.owners))
        path, operations = Messages("gather", received), 2 + applied * applying(like)
        return Cost(received, (path,), applied, 0, chain.slots() * size, 1, operations)

    def _forward(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None], kept: list
    ) -> Iterator[None]:
        if not any(chain.needs):
            return
        pending = group.all_gather(pack([link.map for link in links], chain.slots(), like))
        yield
        maps = unpack(pending.wait().flatten(0, 1), like)
        result[:] = fold(chain, [maps[row] for row in chain.rows], chain.local(group.rank))
        if like.kind != "identity":
            wanted = [maps[chain.rows[i]].A for i in folded_back(chain, group.rank)]
            kept += [torch.stack(wanted)] if wanted else []  # a copy: all that was gathered is P times as much

    def _back(
        self,
        chain: Chain,
        links: Sequence[Link],
        like: Affine,
        group: Group,
        kept: Sequence,
        result: list[Tensor | None],
    ) -> Iterator[None]:
        back = chain.reversed
        if not any(back.needs):
            return
        pending = group.all_gather(pack([link.map for link in links], chain.slots(), bare(like)))
        yield
        gradients = unpack(pending.wait().flatten(0, 1), bare(like))
        A = dict(zip(folded_back(chain, group.rank), kept[0] if kept else ()))
        maps = [
            Affine(like.kind, transpose(like.kind, A.get(len(chain) - 1 - i)), gradients[row].b)
            for i, row in enumerate(back.rows)
        ]
        result[:] = fold(back, maps, back.local(group.rank))


def folded_back(chain: Chain, rank: int) -> list[int]:
    """The links of `chain` whose maps a rank applies when it folds gradients."""
    back = chain.reversed
    return [len(chain) - 1 - i for i in back.folded(back.local(rank))]


def bare(like: Affine) -> Affine:
    """A map like this one without a transition: what is sent where the other ranks know it."""
    return Affine("identity", None, like.b)


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
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(slots, state + transition)


def unpack(rows: Tensor, like: Affine) -> list[Affine]:
    """The maps in rows ``[n, S+M]``, each shaped as `like`."""
    shape, count = transition_shape(like.kind, like.b.shape), len(rows)
    state = like.b.numel()
    b = rows[:, :state].view(count, *like.b.shape).unbind(0)
    A = [None] * count if shape is None else rows[:, state:].view(count, *shape).unbind(0)
    return [Affine(like.kind, *m) for m in zip(A, b)]
