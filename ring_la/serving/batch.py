"""Sequences decoded side by side: one token more of each in one step of the model, whenever each of them came.

States have a row a sequence. Those of recurrences are of one size; keys and values end in the last column, with empty
columns before a shorter sequence's first token, so rows join and leave without a copy of the prompt being read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inference import Prefilled, Sampler
from ..nn import KVCache
from .model import Served


class Row(NamedTuple):
    """One sequence of the batch."""

    job: Any
    sampler: Sampler


class Batch:
    """The sequences a model decodes together.

    Args:
        model: what decodes.
    """

    def __init__(self, model: Served) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._after: Prefilled | None = None
        self._own = False  # whether the states are this batch's to be overwritten

    def add(self, job: Any, prompt: Prefilled, sampler: Sampler) -> None:
        """A sequence more, from its prompt ``(logits [1, V], states of one row)``, which is not written to."""
        if self.rows:
            logits = torch.cat([self._after.logits, prompt.logits])
            self._after = Prefilled(logits, list(map(joined, self._after.states, prompt.states)))
        else:
            self._after = prompt
        self._own = bool(self.rows)
        self.rows.append(Row(job, sampler))

    def keep(self, rows: Sequence[int]) -> None:
        """These rows alone, in this order."""
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in rows]
        if not rows:
            self._after = None
            return
        at = torch.tensor(rows, device=self._after.logits.device)
        self._after = Prefilled(self._after.logits[at], [chosen(state, at) for state in self._after.states])
        self._own = True

    def sample(self) -> list[int | None]:
        """The next token of each row; None where the logits are not finite, which no sampling survives."""
        logits = self._after.logits
        finite = logits.isfinite().all(-1, keepdim=True)
        logits = torch.where(finite, logits, 0)
        if all(row.sampler.temperature == 0 for row in self.rows):
            tokens = logits.argmax(-1)
        else:
            tokens = torch.cat([row.sampler(logits[i : i + 1]) for i, row in enumerate(self.rows)])
        return [token if token >= 0 else None for token in torch.where(finite[:, 0], tokens, -1).tolist()]

    def step(self, tokens: Sequence[int]) -> None:
        """Read the token that came of each row."""
        ids = torch.tensor(tokens, device=self.model.device)
        self._after = self.model.step(ids, self._after.states, in_place=self._own)
        self._own = True


def joined(a: Any, b: Any) -> Any:
    """The rows of one layer's states `a`, then those of `b`."""
    if isinstance(a, KVCache):
        return _joined_keys(a, b)
    return type(a)(*(None if x is None else torch.cat([x, y]) for x, y in zip(a, b)))


def chosen(state: Any, rows: Tensor) -> Any:
    """Some rows of one layer's state."""
    state = type(state)(*(None if x is None else x[rows] for x in state))
    if isinstance(state, KVCache) and state.empty is not None:
        spare = int(state.empty.min())
        empty = state.empty - spare
        return KVCache(state.k[:, spare:], state.v[:, spare:], empty if bool(empty.any()) else None)
    return state


def _joined_keys(a: KVCache, b: KVCache) -> KVCache:
    columns = max(a.k.shape[1], b.k.shape[1])

    def wide(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, columns - x.shape[1], 0))

    lengths = torch.cat([a.length, b.length])
    empty = columns - lengths if bool((lengths < columns).any()) else None
    return KVCache(torch.cat([wide(a.k), wide(b.k)]), torch.cat([wide(a.v), wide(b.v)]), empty)
