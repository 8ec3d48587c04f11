"""What every rank remembers of prompts, by numbers that rank 0 gives, and of the sequences that are decoded."""

from __future__ import annotations

import traceback

from ..comm import Entry
from ..context import ContextParallel
from ..inference import Prefilled
from .batch import NOBODY, Row, lengths_of
from .disk import Disk
from .model import FATAL, Served, keys_stay
from .prefixes import KeptPrefix, kept, whole
from .ranks import DECODING, Ranks, What, Word
from .sampling import Chooser, Ways
from .tiers import Home, Keep, PackedPrefix, pack, unpack
from .trial import batch_for


class States:
    """States of prompts that are read, and what is kept of those that were.

    Args:
        model: what reads. cp: the ranks a prompt is split over. ranks: where they tell each other what came of it.
        keep: whether, and where, states are kept on disk. captured: sequences, at most, where a step is one CUDA graph;
            0: it is not.

    Attributes:
        open: states of prompts that are being read. kept: those for prompts that begin alike; packed: those of them in
            host memory. disk: where more are.
        batch: what is decoded. shared: whether keys stay on the rank that read them. together: whether all ranks
            decode, for that or as each has a part of the weights.
    """

    def __init__(self, model: Served, cp: ContextParallel | None, ranks: Ranks, keep: Keep, captured: int) -> None:
        self._model, self._cp, self._ranks = model, cp, ranks
        self.open: dict[int, Prefilled] = {}
        self.kept: dict[int, KeptPrefix] = {}
        self.packed: dict[int, PackedPrefix] = {}
        rank, size = (0, 1) if cp is None else (cp.rank, cp.size)
        self.disk = None if keep.folder is None else Disk(keep.folder, model.model, rank, size)
        self.shared = keys_stay(model.shares_keys, cp)
        self.together = self.shared or model.shares_weights
        self.batch = batch_for(model, cp, captured)

    @property
    def home(self) -> Home:
        """Where the model has its states, on these ranks."""
        return self._model.home(self._cp)

    def before(self, key: int) -> Prefilled:
        """A state, or what is kept under that number."""
        return self.open[key] if key in self.open else whole(key, self.kept)

    def follow(self, word: Word) -> None:
        """On ranks that follow: all that a word asks for. Rank 0 tells tokens between one step and the next."""
        for _ in range(word.length if word.what == What.AHEAD else 1):
            if self.do(word) is not None:
                return

    def do(self, word: Word, row: Row = NOBODY) -> Exception | None:
        """What all ranks do alike; an error that is the same on all of them is returned, and of what is kept, which
        takes no messages, any rank's. Of `AHEAD` one step. `row`: of who joins.

        Raises:
            PeerError, DisagreementError: it is not the same, or a rank is gone; of a step, with the next step or word.
        """
        if word.what == What.DROP:
            del self.open[word.key]
        elif word.what == What.FORGET:
            self.kept.pop(word.key, None)
            self.packed.pop(word.key, None)
        elif word.what == What.CLEAR:
            self.batch.clear()
        elif word.what in (What.READ, What.KEEP, What.MOVE, *DECODING):
            error = None
            self._compare(word)
            try:
                self._try(word, row)
            except FATAL:
                raise
            except Exception as e:  # of whatever kind: it is a request's, if all have it
                error = e
                _forget_frames(e)
                if word.what in (What.AHEAD, What.STEP, What.STAY):  # what is left of their states is not known
                    self.batch.clear()
            if word.what in (What.KEEP, What.MOVE):
                return self._ranks.any_error(error)
            if error is not None and self.together and word.what == What.AHEAD:  # others may go on to a next step
                self._cp.comm.agreement.again(Entry.of("a step that failed", str(error)))
            if self.together and word.what in (What.AHEAD, What.STEP, What.STAY):
                self._ranks.agree_later(error)
            elif self.together or word.what not in DECODING:
                self._ranks.agree(error)
            return error
        return None

    def _compare(self, word: Word) -> None:
        """What this rank is about to do with what, before it sends anything of it: in the log of calls, so that ranks
        of which one has lost count have the same error."""
        sends = word.what == What.READ or (self.together and word.what in DECODING)
        if self._cp is None or self._cp.size == 1 or not sends:
            return
        said = [f"tokens={0 if word.ids is None else len(word.ids)}"]
        if self.together:
            said.append(f"decoded={self.batch.lengths}")
        if word.start in self.open:
            said.append(f"after={lengths_of(self.open[word.start].states)}")
        elif word.start:
            said.append(f"after={[self.kept[word.start].length] if word.start in self.kept else 'what is not here'}")
        self._cp.comm.agreement.again(Entry.of(f"a server's {word.what.name}", "\n".join(said)))

    def _try(self, word: Word, row: Row) -> None:
        """What a request may fail at."""
        if word.what == What.READ:
            self._read(word)
        elif word.what == What.KEEP:
            self._keep(word)
        elif word.what == What.MOVE:
            self._move(word)
        elif word.what == What.JOIN:
            mine = Row(chooser=Chooser.of(Ways(word.key))) if row is NOBODY else row
            self.batch.add(mine, self.before(word.start))
        elif word.what == What.STAY:
            self.batch.keep(word.ids.tolist())
        elif word.what == What.AHEAD:
            self.batch.go_ahead(bool(word.key))
        else:
            tokens = word.ids.tolist()
            self.batch.keep([i for i, token in enumerate(tokens) if token >= 0])
            self.batch.step([token for token in tokens if token >= 0])

    def _read(self, word: Word) -> None:
        before = self.before(word.start).states if word.start else None
        ids = word.ids[None].to(self._model.device)
        self.open[word.key] = self._model.read(ids, before, self._cp)

    def _move(self, word: Word) -> None:
        name, parent = word.ids[:4].numpy().tobytes().hex(), int(word.ids[4])
        if word.start == 0:
            home = self.home
            if word.key in self.packed:
                packed = self.packed.pop(word.key)
            else:
                packed = self.disk.read(name, parent, self.kept[parent].length if parent else 0, home)
            self.kept[word.key] = unpack(packed, self.kept, home)
            return
        packed = pack(self.kept.pop(word.key)) if word.key in self.kept else self.packed.pop(word.key)
        if word.start == 1:
            self.packed[word.key] = packed
        else:
            self.disk.write(name, packed)

    def _keep(self, word: Word) -> None:
        self.kept[word.key] = kept(self.open[word.key], word.length, word.start, self.kept)


def _forget_frames(error: BaseException | None) -> None:
    """What the failed functions had goes now, keys and states among it, not when garbage is next collected."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
