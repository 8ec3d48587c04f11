"""Sequences decoded side by side: one token more of each in one step of the model, whenever each of them came.

States of recurrences have a row a sequence. Keys and values are where `nn.decoding.KVRows` puts them: a long sequence
has memory of its own, and short ones are not padded to it. Under several ranks they stay where they were read
(`keystore.KeyRows`), every rank has the batch, and steps are taken by all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from ..capturing import CapturedStep
from ..inference import KeyRows, LayerKeys, Prefilled
from ..nn import KVCache
from ..nn.decoding import KVRows
from ..nn.seats import Seats
from .ahead import OnTheWay
from .model import Served
from .sampling import Chooser, Choosers, ChosenToken, Ways, said, told


class Row(NamedTuple):
    """One sequence of the batch: the number by which rank 0 knows whose it is, and how its tokens are chosen, of which
    other ranks know the `Ways`."""

    number: int = 0
    chooser: Chooser = Chooser()


NOBODY = Row()


class Batch:
    """The sequences a model decodes together.

    Args:
        model: what decodes.

    Attributes:
        graphs: the most CUDA graphs of its steps that there were at once.
    """

    graphs = 0

    def __init__(self, model: Served) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._after: Prefilled | None = None
        self._own = False  # whether the states are this batch's to be overwritten
        self._choosers = Choosers(model.device)
        self._picked: OnTheWay | None = None  # what `choose` has chosen, on rank 0
        self._said: OnTheWay | None = None  # what the model said of it

    @property
    def logits(self) -> torch.Tensor:
        """Of each row's next token ``[N, vocab_size]``."""
        return self._after.logits

    @property
    def sends(self) -> bool:
        """Whether rank 0 sends the tokens of the next step that goes ahead, as not all ranks have them."""
        return True

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, where something remembers single tokens, else 0."""
        return (lengths_of(self._after.states) or [0] * len(self.rows)) if self.rows else []

    @property
    def _ways(self) -> Ways:
        """What the rows' tokens need."""
        return reduce(or_, (row.chooser.ways for row in self.rows), Ways(0))

    def add(self, row: Row, prompt: Prefilled) -> None:
        """A sequence more, from its prompt ``(logits [1, V], states of one row)``, which is not written to."""
        self._after = self._arranged(range(len(self.rows)), [prompt])
        self._own = bool(self.rows)
        self._choosers.seat(len(self.rows), row.chooser, prompt.logits.shape[1])
        self.rows.append(row)

    def keep(self, rows: Sequence[int]) -> None:
        """These rows alone, in this order."""
        if len(rows) == len(self.rows):
            return
        self._after = self._arranged(rows, []) if rows else None
        self._choosers.keep(rows)
        self._own = True
        self.rows = [self.rows[i] for i in rows]

    def close(self) -> None:
        """Nothing will be decoded any more, and the ranks may part."""

    def clear(self) -> None:
        """No rows, whatever state they are in."""
        self.rows, self._after = [], None

    def _arranged(self, rows: Sequence[int], more: Sequence[Prefilled]) -> Prefilled:
        """Logits and states of some rows, then of more sequences."""
        if not self.model.flexible:
            return more[0]
        parts = list(more)
        if rows:
            parts.insert(0, self._after if len(rows) == len(self.rows) else _chosen(self._after, rows))
        logits = torch.cat([part.logits for part in parts]) if len(parts) > 1 else parts[0].logits
        layers = zip(*(part.states for part in parts))
        before = self._after.states if rows else [None] * len(parts[0].states)
        states: list[Any] = []
        seats = shared = None
        for old, layer in zip(before, layers):
            if isinstance(layer[-1], LayerKeys):
                if shared is None:  # the same for every layer
                    stay = [] if old is None else [old.rows.chosen(rows)]
                    shared = KeyRows.joined([*stay, *(prompt.states[len(states)].rows for prompt in more)])
                states.append(shared[layer[-1].layer])
            elif isinstance(layer[-1], (KVCache, KVRows)):
                new = [state for state in layer if isinstance(state, KVCache)]
                held = old or KVRows(Seats.of([], self.model.device))
                if seats is None:  # the same for every layer
                    seats = held.seats.moved(rows, [state.k.shape[1] for state in new])
                states.append(held.moved(rows, new, seats))
            else:
                fields = zip(*layer)
                states.append(type(layer[0])(*(_joined(field) for field in fields)))
        return Prefilled(logits, states)

    def choose(self) -> int:
        """Choose the next token of each row, which `told` says; how many steps may `go_ahead` from here, each before
        its tokens are told."""
        self._picked = self._said = None
        tokens = self._next_tokens()
        self._picked = OnTheWay(tokens)
        asked = [row.chooser.logprobs for row in self.rows if row.chooser.logprobs is not None]
        if asked:
            self._said = OnTheWay(told(self.logits, tokens, max(asked)))
        return 0

    def told(self) -> list[ChosenToken | None]:
        """The token that was chosen of each row, and what the model said of it where that is asked for; None where the
        logits are not finite, or none can be drawn."""
        tokens = self._picked.there(self._launched).tolist()
        of_each = [None] * len(tokens) if self._said is None else self._said.there(self._launched).tolist()
        return [
            None if token < 0 else ChosenToken(token, said(numbers, row.chooser.logprobs))
            for token, numbers, row in zip(tokens, of_each, self.rows)
        ]

    @property
    def _launched(self) -> CapturedStep | None:
        """The step that tokens come behind, where it is one that does not wait for them."""
        return None

    def go_ahead(self, send: bool) -> None:
        """Take the step of the tokens that are chosen, before a host knows them; `send`: rank 0 sends its own first."""
        raise NotImplementedError("of a batch that can")

    def _next_tokens(self) -> torch.Tensor:
        """The next token of each row ``[N]``, on the device, −1 where there is none."""
        return self._choosers.choose(self.logits, self._ways)

    def step(self, tokens: Sequence[int]) -> None:
        """Read the token that came of each row."""
        ids = torch.tensor(tokens, device=self.model.device)
        self._after = self.model.step(ids, self._after.states, in_place=self._own)
        self._own = True
        if not self.model.flexible:
            return
        seats = next((state.seats for state in self._after.states if isinstance(state, KVRows)), None)
        if seats is not None:
            seats.advance()
            if seats.full:
                self._after = self._arranged(range(len(self.rows)), [])


def lengths_of(states: Sequence[Any]) -> list[int]:
    """Tokens of the sequences whose states these are, where a layer has keys of them; else nothing."""
    for state in states:
        if isinstance(state, LayerKeys):
            return state.rows.lengths
        if isinstance(state, KVCache):
            return [state.k.shape[1]] * len(state.k)
    return []


def _joined(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Rows of one tensor, one part after the other."""
    return rows[0] if rows[0] is None or len(rows) == 1 else torch.cat(rows)  # type: ignore[arg-type]


def _chosen(after: Prefilled, rows: Sequence[int]) -> Prefilled:
    """Some rows of what has a row a sequence; keys and values as they are."""
    at = torch.tensor(rows, device=after.logits.device)

    def of(state: Any) -> Any:
        return (
            state
            if isinstance(state, (KVRows, LayerKeys))
            else type(state)(*(None if x is None else x[at] for x in state))
        )

    return Prefilled(after.logits[at], [of(state) for state in after.states])
