"""What every rank remembers of prompts, by numbers that rank 0 gives."""

from __future__ import annotations

import torch

from ..context import ContextParallel
from ..errors import DisagreementError, PeerError
from ..inference import Prefilled
from .model import Served
from .prefixes import KeptPrefix, kept, whole
from .ranks import Ranks, What, Word

FATAL = (PeerError, DisagreementError, torch.AcceleratorError)
"""After these nothing can be trusted any more."""


class States:
    """States of prompts that are read, and what is kept of those that were.

    Args:
        model: what reads. cp: the ranks a prompt is split over. ranks: where they tell each other what came of it.

    Attributes:
        open: states of the prompt that is being read. kept: those for prompts that begin alike.
    """

    def __init__(self, model: Served, cp: ContextParallel | None, ranks: Ranks) -> None:
        self._model, self._cp, self._ranks = model, cp, ranks
        self.open: dict[int, Prefilled] = {}
        self.kept: dict[int, KeptPrefix] = {}

    def before(self, key: int) -> Prefilled:
        """A state, or what is kept under that number."""
        return self.open[key] if key in self.open else whole(key, self.kept)

    def do(self, word: Word) -> Exception | None:
        """What all ranks do alike; an error that is the same on all of them is returned.

        Raises:
            PeerError, DisagreementError: it is not the same, or a rank is gone.
        """
        if word.what == What.DROP:
            del self.open[word.key]
        elif word.what == What.FORGET:
            del self.kept[word.key]
        elif word.what in (What.READ, What.KEEP):
            error = None
            try:
                self._read(word) if word.what == What.READ else self._keep(word)
            except FATAL:
                raise
            except Exception as e:  # of whatever kind: it is a request's, if all have it
                error = e
            self._ranks.agree(error)
            return error
        return None

    def _read(self, word: Word) -> None:
        before = self.before(word.start).states if word.start else None
        ids = word.ids[None].to(self._model.device)
        self.open[word.key] = self._model.read(ids, before, self._cp)

    def _keep(self, word: Word) -> None:
        self.kept[word.key] = kept(self.open[word.key], word.length, word.start, self.kept)
