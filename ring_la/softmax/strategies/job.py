"""What a strategy is given: a group, whose rows stand where, and a kernel. It knows nothing of masks or layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...comm import Group
from ..backends import AttentionBackend, QueryRows
from ..geometry import Pair, Tokens, sees
from ..merging import Gradients, Partial, wide
from ..scores import Scores


@dataclass(frozen=True)
class AttentionJob:
    """One call, seen from one rank.

    Attributes:
        backend, scores: what computes a block, and how.
        rows: for each rank of the group, its queries.
        keys: for each rank of the group, its keys.
        all_keys: the keys of all ranks together, where they are gathered.
        order: the row of the ranks' keys, one after the other, that each of `all_keys` is; None: the same.
        group: None on one device.
    """

    backend: AttentionBackend
    scores: Scores
    rows: tuple[Tokens, ...]
    keys: tuple[Tokens, ...]
    all_keys: Tokens | None = None
    order: Tensor | None = None
    group: Group | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    @cached_property
    def sees(self) -> tuple[tuple[bool, ...], ...]:
        """Whether any query of rank r sees any key of rank s, at [r][s]."""
        reach = self.scores.reach
        return tuple(tuple(sees(Pair(rows, keys, reach)) for keys in self.keys) for rows in self.rows)

    def against(self, keys: Tokens) -> Pair:
        """This rank's queries and keys that stand so."""
        return Pair(self.rows[self.rank], keys, self.scores.reach)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a rank's share of a key's gradient is sent in: the dtype in which the kernel gives it."""
        return wide(dtype) if self.backend.sums_wide else dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, owner: int, out: Partial) -> None:
        """Add attention over the keys of `owner`."""
        if self.sees[self.rank][owner]:
            self.forward_to(q, k, v, self.keys[owner], out)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, owner: int, out: Gradients) -> None:
        """Add the gradients of attention over the keys of `owner`."""
        if self.sees[self.rank][owner]:
            self.backward_to(x, k, v, self.keys[owner], out)

    def forward_to(self, q: Tensor, k: Tensor, v: Tensor, keys: Tokens, out: Partial) -> None:
        """Add attention over keys that stand as `keys` says."""
        if q.numel() and k.numel():
            self.backend.forward(q, k, v, self.scores, self.against(keys), out)

    def backward_to(self, x: QueryRows, k: Tensor, v: Tensor, keys: Tokens, out: Gradients) -> None:
        """Add the gradients of attention over keys that stand as `keys` says."""
        if x.q.numel() and k.numel():
            self.backend.backward(x, k, v, self.scores, self.against(keys), out)


class Strategy(Protocol):
    """An exchange of keys and values. Collective over the job's group, forward and backward."""

    name: str

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        """Add attention of this rank's queries over all ranks' keys to `out`."""
        ...

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        """The gradients of this rank's q, k and v, wide."""
        ...


class AllHere:
    """All keys are here: nothing travels."""

    name = "here"

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        job.forward(q, k, v, job.rank, out)

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        out = Gradients.of(x.q, k, v)
        job.backward(x, k, v, job.rank, out)
        return out


class KeyValues:
    """Keys and values of one rank as one flat message; `k` and `v` are views of it."""

    def __init__(self, flat: Tensor, tokens: int, k: Tensor, v: Tensor) -> None:
        shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in (k, v)]
        self.flat = flat
        parts = flat.split([prod(s) for s in shapes])
        self.k, self.v = (part.view(shape) for part, shape in zip(parts, shapes))

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KeyValues:
        """A message with these values."""
        return cls(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape[1], k, v)

    @classmethod
    def empty(cls, tokens: int, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> KeyValues:
        """Room for a message of `tokens` keys shaped as `k` and `v` else."""
        return cls(k.new_empty(cls.size(tokens, k, v), dtype=dtype or k.dtype), tokens, k, v)

    @staticmethod
    def size(tokens: int, k: Tensor, v: Tensor) -> int:
        """Numbers in a message of `tokens` keys."""
        return k.shape[0] * tokens * (prod(k.shape[2:]) + prod(v.shape[2:]))
