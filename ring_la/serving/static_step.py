"""One step of the sequences of a `StaticBatch`: what its CUDA graph is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..context import ContextParallel
from ..keystore.static import StaticKeys, StaticRows
from ..nn import LayerState
from .model import Served
from .sampling import Choosers, Ways


class StaticStep:
    """What a graph is made of, and all that it reads: a step of a model over states of fixed addresses, and the choice
    of the tokens behind it. cp: ranks of which all take the tokens of the first."""

    def __init__(
        self,
        model: Served,
        keys: StaticRows,
        states: Sequence[Any],
        choosers: Choosers,
        cp: ContextParallel | None,
    ) -> None:
        self._model, self._keys, self._states, self._choosers, self._cp = model, keys, states, choosers, cp

    @torch.no_grad()
    def take(self, tokens: Tensor, columns: int, ways: Ways) -> tuple[Tensor, Tensor]:
        """A token more of the first seats: the logits after it, and the next tokens, chosen in these ways. What is done
        is the same for all values."""
        n = len(tokens)
        self._keys.begin(n, columns)
        views = [s if isinstance(s, StaticKeys) else _first(s, n) for s in self._states]
        out = self._model.step(tokens, views, in_place=True)
        for mine, new in zip(views, out.states):
            if isinstance(mine, LayerState):
                for buffer, x in zip(mine, new):
                    if buffer is not None and x.data_ptr() != buffer.data_ptr():
                        buffer.copy_(x)
        self._keys.advance()
        choice = self._choosers.choose(out.logits, ways)
        return out.logits, choice if self._cp is None else self._cp.comm.all_gather(choice).wait()[0]


def _first(state: LayerState, n: int) -> LayerState:
    """The first rows of a state."""
    return LayerState(*(x if x is None else x[:n] for x in state))
