"""A `HybridLM` that is decoded as one forward pass would read it, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..blockwise import BLOCK
from ..checks import check_kind
from ..context import ContextParallel
from ..errors import ArgumentError
from ..inference import BlockReader, Prefilled
from ..models import HybridLM
from .model import Hybrid


class HybridByBlock(Hybrid):
    """A `HybridLM` whose logits, those behind a prompt and behind each token, are the bits of a forward pass over the
    whole text under a deterministic layout, on any number of ranks, packed with any others. So the log-probabilities
    that an engine tells are those that a trainer of the same parameters finds.

    A token reads those since the last multiple of 64 again, one sequence at a time; nothing is kept of prompts.

    Args:
        model: its layers may be of any kind that `BlockReader` takes. cp: the engine's, deterministic. Collective.

    Raises:
        ArgumentError: another cp. UnsupportedError: a layer of another kind, by name.
    """

    flexible = resumes = goes_on = False

    def __init__(self, model: HybridLM, cp: ContextParallel) -> None:
        check_kind("cp", cp, ContextParallel)
        if not cp.deterministic:
            raise ArgumentError("cp", "one with deterministic=True", repr(cp))
        super().__init__(model)
        self.cp, self._alone = cp, cp
        if cp.size > 1:
            own: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._alone = ContextParallel(own, deterministic=True)
        BlockReader(model, self._alone)  # refuses layers now, not at a prompt

    @torch.no_grad()
    def read(self, ids: Tensor, states: Any, cp: ContextParallel | None) -> Prefilled:
        reader = BlockReader(self.model, self._alone)
        border = ids.shape[1] // BLOCK * BLOCK
        layout = self.cp.layout(border, self.kind) if border and self.cp.size > 1 else None
        return Prefilled(reader.prefill(ids, layout=layout), [reader])

    def step(self, tokens: Tensor, states: list[Any], in_place: bool) -> Prefilled:
        reader = copy.copy(states[0])  # what it holds is replaced, not written to
        return Prefilled(reader.step(tokens), [reader])
