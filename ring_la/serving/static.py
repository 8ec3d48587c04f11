"""The sequences a model decodes together, where a step is one CUDA graph: every state has its address for good.

    batch = StaticBatch(model, cp, most=8)

Sequences have seats; one that leaves makes room for the next. A step takes the seats up to the last that is taken, in
buckets of 1, 2, 4 …, and of keys as many columns as the longest needs, in powers of two from `COLUMNS` on and from
`FINE` on in quarters of them, as all of a bucket's columns are read. For each pair of buckets there is a graph
(`ring_la.capture`); where there is no GPU the same step runs as it is. More seats or longer sequences take new memory,
and new graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import Buckets
from ..capture import CapturedStep, capture
from ..context import ContextParallel
from ..errors import UnsupportedError
from ..inference import LayerKeys, Prefilled, Sampler
from ..keystore.static import StaticKeys, StaticRows
from ..models import HybridLM
from ..nn import Attention, LayerState
from .batch import Batch, Row
from .model import Served
from .sampling import Chooser

COLUMNS = 256
"""The fewest columns of keys."""
FINE = 4096
"""Columns from which a bucket is at most a quarter larger than what it holds."""


class StaticBatch(Batch):
    """A `Batch` of a `HybridLM` with states of fixed addresses. Collective where keys are shared out over ranks.

    Args:
        model: what decodes. cp: the ranks that decode together; None: this one alone. most: sequences, at most.

    Raises:
        UnsupportedError: layers that remember something else than a state of one size, or keys and values.
    """

    def __init__(self, model: Served, cp: ContextParallel | None, most: int) -> None:
        super().__init__(model)
        if not isinstance(model.model, HybridLM):
            raise UnsupportedError("capture", "False for other models than a HybridLM", type(model.model).__name__)
        self._layers: list[Any] = [block.layer for block in model.model.blocks]
        wrong = [x for x in self._layers if not isinstance(x, Attention) and x.state_type is not LayerState]
        if wrong:
            raise UnsupportedError("capture", "False for a model with such a layer", type(wrong[0]).__name__)
        self._cp, self._most = cp, most
        self._seats: list[int] = []  # of the rows
        self._taken: dict[int, tuple[int, int]] = {}  # columns at first, the most of a rank, and tokens since
        self._logits = torch.zeros(0, model.vocab_size)
        self._keys: StaticRows | None = None
        self._states: list[Any] = []
        self._step: CapturedStep | None = None

    @property
    def logits(self) -> Tensor:
        return self._logits

    def add(self, number: int, prompt: Prefilled, sampler: Sampler | Chooser | None) -> None:
        seat = next(i for i in range(self._most) if i not in self._seats)
        parts = [self._part(layer, state) for layer, state in zip(self._layers, prompt.states)]
        positions, length = self._positions(prompt)
        columns = torch.tensor(len(positions), device=self.model.device)
        if self._cp is not None:
            columns = self._cp.comm.all_reduce(columns, dist.ReduceOp.MAX).wait()
        self._taken[seat] = int(columns), 0
        self._room(seat + 1, int(columns) + 1, prompt.states)
        self._keys.seat(seat, positions, length)
        for mine, part in zip(self._states, parts):
            if isinstance(mine, StaticKeys):
                mine.fill(seat, *part)
                continue
            for buffer, x in zip(mine, part):
                if buffer is not None:
                    buffer[seat] = x[0]
        logits = prompt.logits.to(self.model.device)
        self._logits = torch.cat([self._logits, logits]) if self.rows else logits
        self._seats.append(seat)
        self.rows.append(Row(number, sampler))

    def keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self.rows):
            self._logits = self._logits[torch.tensor(rows, dtype=torch.int64, device=self._logits.device)]
            self.rows, self._seats = [self.rows[i] for i in rows], [self._seats[i] for i in rows]

    def clear(self) -> None:
        self.keep([])

    def step(self, tokens: Sequence[int]) -> None:
        ranks, taken = self._keys.ranks, [self._taken[seat] for seat in self._seats]
        longest = 1 + max(columns + -(-since // ranks) for columns, since in taken)  # ranks take new ones in turn
        self._room(1, longest, ())
        ids = torch.zeros(max(self._seats) + 1, dtype=torch.int64)
        ids[self._seats] = torch.tensor(tokens)
        columns = min(self._keys.capacity, columns_for(longest))
        out = self._step(tokens=ids.to(self.model.device), columns=columns)
        self._step.wait()  # a rank that died is named instead of waited for
        self._logits = out[torch.tensor(self._seats, device=out.device)]
        for seat in self._seats:
            self._taken[seat] = self._taken[seat][0], self._taken[seat][1] + 1

    # -- memory --------------------------------------------------------------------------------------------

    def _part(self, layer: Any, state: Any) -> Any:
        """What a layer remembers of one sequence: its keys, values and what it carries, or a `LayerState`."""
        if isinstance(state, LayerState):
            return state
        if isinstance(state, LayerKeys):
            [held] = state.rows.held
            views = [state.views(span) for span in held.spans(0, held.here)]
            k, v = (torch.cat(x) for x in zip(*views)) if views else (torch.zeros(0),) * 2
            return k, v, None if state.carried is None else state.carried[0]
        carried = layer.carried_of(state.k[:, -1])
        return state.k[0], state.v[0], None if carried is None else carried[0]

    def _positions(self, prompt: Prefilled) -> tuple[Tensor, int]:
        """Positions of this rank's tokens, and how many there are on all; none where no layer has keys."""
        for layer, state in zip(self._layers, prompt.states):
            if isinstance(state, LayerKeys):
                [held] = state.rows.held
                return torch.tensor([p for run in held.runs for p in run], dtype=torch.int64), held.length
            if isinstance(layer, Attention):
                return torch.arange(state.k.shape[1]), state.k.shape[1]
        return torch.zeros(0, dtype=torch.int64), 0

    def _room(self, seats: int, columns: int, like: Sequence[Any]) -> None:
        """Memory for so many seats and columns of keys; what is there stays."""
        old = self._keys
        if old is not None and seats <= old.size and columns <= old.capacity:
            return
        size = max(0 if old is None else old.size, min(self._most, _power(seats, 1)))
        capacity = max(0 if old is None else old.capacity, columns_for(columns))
        cp = self._cp if any(isinstance(layer, Attention) for layer in self._layers) else None
        keys = StaticRows(size, capacity, cp, self.model.device)
        states: list[Any] = []
        for i, layer in enumerate(self._layers):
            before = self._states[i] if self._states else None
            if isinstance(layer, Attention):
                embedding: Any = self.model.model.embedding
                states.append(StaticKeys(keys, layer.key_size, embedding.weight.dtype))
                if before is not None:
                    states[-1].take_over(before)
            else:
                fields = like[i] if before is None else before
                states.append(LayerState(*(None if x is None else _grown(x, size, before is not None) for x in fields)))
        if old is not None:
            keys.take_over(old)
        self._keys, self._states = keys, states
        sizes = sorted({min(self._most, 1 << n) for n in range(self._most.bit_length() + 1)})
        self._step = capture(self._stepped, cp, buckets=Buckets(sizes, {"tokens": 0}, dim=0))

    @torch.no_grad()
    def _stepped(self, tokens: Tensor, columns: int) -> Tensor:
        """A token more of the first seats: the logits after it. What is done is the same for all values."""
        n = len(tokens)
        self._keys.begin(n, columns)
        views = [s if isinstance(s, StaticKeys) else _first(s, n) for s in self._states]
        out = self.model.step(tokens, views, in_place=True)
        for mine, new in zip(views, out.states):
            if isinstance(mine, LayerState):
                for buffer, x in zip(mine, new):
                    if buffer is not None and x.data_ptr() != buffer.data_ptr():
                        buffer.copy_(x)
        self._keys.advance()
        return out.logits


def _first(state: LayerState, n: int) -> LayerState:
    """The first rows of a state."""
    return LayerState(*(x if x is None else x[:n] for x in state))


def columns_for(n: int) -> int:
    """Columns of the bucket that holds n."""
    power = _power(n, COLUMNS)
    if power <= FINE:
        return power
    quarter = power // 8  # of the power before
    return -(-n // quarter) * quarter


def _power(n: int, least: int) -> int:
    """The smallest power of two that is at least n, and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def _grown(x: Tensor, size: int, ours: bool) -> Tensor:
    """Zeros with a row for each seat, of rows like those of `x`, which stay where they are ours."""
    out = x.new_zeros(size, *x.shape[1:])
    if ours:
        out[: len(x)] = x
    return out
