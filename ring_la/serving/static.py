"""The sequences a model decodes together, where a step is one CUDA graph: every state has its address for good.

    batch = StaticBatch(model, cp, most=8)

Its model is a `HybridLM`, or one of Transformers whose sequences are rows (`trial.batch_for` sees whether that goes).
Sequences have seats; one that leaves makes room for the next. A step takes the seats up to the last that is taken, in
buckets of 1, 2, 4 …, and of keys as many columns as the longest needs, in powers of two from `COLUMNS` on and from
`FINE` on in quarters of them, as all of a bucket's columns are read. For each pair of buckets there is a graph
(`ring_la.capture`); where there is no GPU the same step runs as it is. More seats or longer sequences take new memory,
and new graphs.

On GPUs a step is launched before the host knows its tokens (`go_ahead`): it reads them on the device, where all ranks
have what rank 0 chose within the step before, and the host's work on them goes on beside it. A sequence that ends with
such a token has been stepped more often than it needs, which nobody reads. What is chosen in other ways (`Ways`) than
before is another graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..capturing import Buckets, CapturedStep, capture
from ..context import ContextParallel
from ..errors import UnsupportedError
from ..inference import KeySize, LayerKeys, Prefilled
from ..kernels.sizes import power_of_2
from ..keystore.static import StaticKeys, StaticRows
from ..models import HybridLM
from ..nn import KVCache, LayerState
from .ahead import goes_ahead
from .batch import Batch, Row
from .model import Served
from .sampling import Choosers
from .static_step import StaticStep

COLUMNS = 256
"""The fewest columns of keys."""
FINE = 4096
"""Columns from which a bucket is at most a quarter larger than what it holds."""


class StaticBatch(Batch):
    """A `Batch` with states of fixed addresses. Collective where all ranks decode.

    Args:
        model: what decodes. cp: the ranks that decode together, each with its part of the keys; None: this one alone.
        most: sequences, at most.

    Raises:
        UnsupportedError: layers that remember something else than a state of one size, or keys and values, or that the
            host has a part in.
    """

    def __init__(self, model: Served, cp: ContextParallel | None, most: int) -> None:
        super().__init__(model)
        self._layers: list[Any] | None = None  # of a HybridLM
        if isinstance(model.model, HybridLM):
            self._layers = [block.layer for block in model.model.blocks]
            known = (KVCache, LayerState)
            wrong = [x for x in self._layers if x.host_steps or x.state_type not in known]
            if wrong:
                raise UnsupportedError("capture", "False for a model with such a layer", type(wrong[0]).__name__)
        elif not model.flexible:
            got = f"{type(model.model).__name__}, whose sequences are decoded alone"
            raise UnsupportedError("capture", "False for a model whose states are no rows", got)
        self._cp, self._most = cp, most
        self._seats: list[int] = []  # of the rows
        self._in_order = True  # whether the rows are the first seats, one after the other
        self._at = torch.zeros(0, dtype=torch.int64, device="cpu")  # the seats, on the device
        self._taken: dict[int, tuple[int, int]] = {}  # columns at first, the most of a rank, and tokens since
        self._logits = torch.zeros(0, model.vocab_size, device="cpu")
        self._choice = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._keys: StaticRows | None = None
        self.graphs = 0
        self._sizes: list[KeySize | None] = []
        self._states: list[Any] = []
        self._step: CapturedStep | None = None
        self._choosers = Choosers(model.device, most)
        self._goes_ahead = goes_ahead(model.device)
        self._same = False  # whether `_choice` is rank 0's on all ranks

    @property
    def logits(self) -> Tensor:
        return self._logits

    @property
    def lengths(self) -> list[int]:
        return [sum(self._taken[seat]) for seat in self._seats]

    def close(self) -> None:
        if self._step is not None:
            self._step.release()

    def add(self, row: Row, prompt: Prefilled) -> None:
        seat = next(i for i in range(self._most) if i not in self._seats)
        parts = [self._part(i, state) for i, state in enumerate(prompt.states)]
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
        self._choosers.seat(seat, row.chooser, logits.shape[1])
        choice = self._choosers.choose(logits, row.chooser.ways, first=seat)
        self._choice = torch.cat([self._choice, choice]) if self.rows else choice
        self._same = False
        self._sit([*self._seats, seat])
        self.rows.append(row)

    def keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self.rows):
            at = torch.tensor(rows, dtype=torch.int64, device=self._logits.device)
            self._logits, self._choice = self._logits[at], self._choice[at]
            self.rows = [self.rows[i] for i in rows]
            stay = [self._seats[i] for i in rows]
            self._keys.leave([seat for seat in self._seats if seat not in stay])
            self._sit(stay)

    def _sit(self, seats: list[int]) -> None:
        """The rows have these seats from now on. A step finds them on the device, and brings nothing there."""
        self._seats, self._in_order = seats, seats == list(range(len(seats)))
        self._at = torch.tensor(seats, dtype=torch.int64, device=self.model.device)

    def clear(self) -> None:
        self.keep([])
        self._picked = None

    @property
    def sends(self) -> bool:
        return not self._same

    def choose(self) -> int:
        super().choose()
        return self._steps_in_memory() if self._goes_ahead else 0

    @property
    def _launched(self) -> CapturedStep | None:
        return self._step

    def go_ahead(self, send: bool) -> None:
        tokens = self._choice
        if send and self._cp is not None:
            tokens = self._cp.comm.all_gather(tokens).wait()[0]  # rank 0's
        self._take(tokens.clamp(min=0))  # a row without a token leaves

    def _next_tokens(self) -> Tensor:
        return self._choice

    def step(self, tokens: Sequence[int]) -> None:
        self._room(1, self._longest(), ())
        self._take(torch.tensor(tokens, device="cpu"))
        self._step.wait()  # a rank that died is named instead of waited for

    def _longest(self) -> int:
        """Columns that a further step needs."""
        ranks, taken = self._keys.ranks, [self._taken[seat] for seat in self._seats]
        return 1 + max(columns + -(-since // ranks) for columns, since in taken)  # ranks take new ones in turn

    def _steps_in_memory(self) -> int:
        """Further steps that there are columns for."""
        ranks, taken = self._keys.ranks, [self._taken[seat] for seat in self._seats]
        return max(0, 1 + min((self._keys.capacity - 1 - columns) * ranks - since for columns, since in taken))

    def _take(self, tokens: Tensor) -> None:
        """Launch a step of these tokens of the rows ``[N]``."""
        ids = tokens.to(self.model.device)
        if not self._in_order:
            ids = ids.new_zeros(max(self._seats) + 1).index_copy_(0, self._at, ids)
        columns = min(self._keys.capacity, columns_for(self._longest()))
        logits, choice = self._step(tokens=ids, columns=columns, ways=self._ways)
        self.graphs = max(self.graphs, self._step.graphs)
        at: Any = slice(len(self._seats)) if self._in_order else self._at
        self._logits, self._choice, self._same = logits[at], choice[at], True
        for seat in self._seats:
            self._taken[seat] = self._taken[seat][0], self._taken[seat][1] + 1

    # -- memory --------------------------------------------------------------------------------------------

    def _part(self, i: int, state: Any) -> Any:
        """What a layer remembers of one sequence: its keys, values and what it carries, or a `LayerState`."""
        if isinstance(state, LayerState):
            return state
        layer = None if self._layers is None else self._layers[i]
        if isinstance(state, LayerKeys):
            [held] = state.rows.held
            views = [state.views(span) for span in held.spans(0, held.here)]
            k, v = (torch.cat(x) for x in zip(*views)) if views else (torch.zeros(0, device="cpu"),) * 2
            carried = state.carried
        else:
            k, v = state.k[0, self._mine], state.v[0, self._mine]
            carried = None if layer is None else layer.carried_of(state.k[:, -1])
        if layer is not None and len(k):
            k, v = layer.fixed_parts(k, v)
        return k, v, None if carried is None else carried[0]

    @property
    def _mine(self) -> slice:
        """Which tokens' keys this rank takes where every rank has all of them."""
        return slice(None) if self._cp is None else slice(self._cp.rank, None, self._cp.size)

    def _positions(self, prompt: Prefilled) -> tuple[Tensor, int]:
        """Positions of this rank's tokens, and how many there are on all; none where no layer has keys."""
        for state in prompt.states:
            if isinstance(state, LayerKeys):
                [held] = state.rows.held
                return torch.tensor([p for run in held.runs for p in run], dtype=torch.int64, device="cpu"), held.length
            if isinstance(state, KVCache):
                return torch.arange(state.k.shape[1], device="cpu")[self._mine], state.k.shape[1]
        return torch.zeros(0, dtype=torch.int64, device="cpu"), 0

    def _room(self, seats: int, columns: int, like: Sequence[Any]) -> None:
        """Memory for so many seats and columns of keys; what is there stays."""
        old = self._keys
        if old is not None and seats <= old.size and columns <= old.capacity:
            return
        size = max(0 if old is None else old.size, min(self._most, power_of_2(seats)))
        capacity = max(0 if old is None else old.capacity, columns_for(columns))
        if old is None:
            self._sizes = [self._size_of(i, state) for i, state in enumerate(like)]
        before = self._states or [None] * len(self._sizes)
        cp = self._cp if any(self._sizes) else None
        keys = StaticRows(size, capacity, cp, self.model.device)
        states: list[Any] = []
        for i, (kept, mine) in enumerate(zip(self._sizes, before)):
            if kept is not None:
                states.append(StaticKeys(keys, kept, self._dtype(like[i]) if mine is None else mine.k.dtype))
                if mine is not None:
                    states[-1].take_over(mine)
            else:
                fields = like[i] if mine is None else mine
                states.append(LayerState(*(None if x is None else _grown(x, size, mine is not None) for x in fields)))
        if old is not None:
            keys.take_over(old)
        self._keys, self._states = keys, states
        self.close()  # graphs of other addresses
        seats_of = sorted({min(self._most, 1 << n) for n in range(self._most.bit_length() + 1)})
        step = StaticStep(self.model, keys, states, self._choosers, self._cp if self._goes_ahead else None).take
        self._step = capture(step, self._cp, buckets=Buckets(seats_of, {"tokens": 0}, dim=0))

    def _size_of(self, i: int, state: Any) -> KeySize | None:
        """What a token takes of what a layer remembers; None: nothing, its state has one size."""
        if isinstance(state, LayerState):
            return None
        if self._layers is not None:
            return self._layers[i].fixed_size
        if isinstance(state, LayerKeys):
            return state.size
        return KeySize(state.k.shape[2], state.k.shape[3], state.v.shape[3])

    def _dtype(self, state: Any) -> torch.dtype:
        """Of a layer's keys."""
        return state.k.dtype if isinstance(state, KVCache) else state.rows.store.dtype


def columns_for(n: int) -> int:
    """Columns of the bucket that holds n."""
    power = max(COLUMNS, power_of_2(n))
    if power <= FINE:
        return power
    quarter = power // 8  # of the power before
    return -(-n // quarter) * quarter


def _grown(x: Tensor, size: int, ours: bool) -> Tensor:
    """Zeros with a row for each seat, of rows like those of `x`, which stay where they are ours."""
    out = x.new_zeros(size, *x.shape[1:])
    if ours:
        out[: len(x)] = x
    return out
