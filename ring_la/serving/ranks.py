"""Rank 0 decides, the others follow: what to do next travels on the CPU, over gloo, on CPUs in the model's own group.

Every word is an exchange among all ranks, so that each hears of the others: rank 0 says something once a second even
if nothing is to be done. A server may be idle for ever and no wait comes near its timeout; a rank that died or stalled
is a `PeerError` on all that are left. A step of decoding is one word and no other message of hosts: few tokens are in
the word itself, and what came of a step is compared with the next one. Of steps whose tokens travel on the devices one
word is for several.
"""

from __future__ import annotations

import time
import zlib
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_kind
from ..comm import Group
from ..context import ContextParallel
from ..errors import ArgumentError

INLINE = 64
"""As many tokens ride in a word."""
DONE = "done"
PAUSE = 1.0
"""Seconds without a word after which rank 0 says `NOTHING`."""


class What(IntEnum):
    """What ranks do next."""

    NOTHING = 0
    READ = 1
    """Read `ids` after the tokens of state `start`, or of what is kept as `start`; the result is state `key`."""
    DROP = 2
    """Forget state `key`."""
    KEEP = 3
    """Keep state `key` for prompts that begin alike, after what is kept as `start` (0: nothing)."""
    FORGET = 4
    """Forget what is kept as `key`."""
    STOP = 5
    """Said by another rank than 0: it was told to stop, so all should."""
    JOIN = 6
    """The sequence of state `start`, or of what is kept as `start`, is decoded from now on, the last of the batch."""
    STEP = 7
    """Those sequences of the batch leave whose number in `ids` is −1; read these tokens of the others."""
    STAY = 8
    """The sequences of the batch at `ids` stay, the others leave."""
    CLEAR = 9
    """The batch is empty from now on."""
    MOVE = 10
    """What is kept as `key` goes to tier `start`: 0 the device, 1 host memory, 2 disk; `ids`: its name there as four
    numbers, and the key of what it was kept after."""
    AHEAD = 11
    """Take the batch's next `length` steps, with tokens that are on the devices and no host knows yet; `key` 1: rank 0
    sends them there, 0: they are there."""


TOKENS = (What.READ, What.STEP, What.STAY, What.MOVE)
"""Words with `ids`."""
DECODING = (What.JOIN, What.AHEAD, What.STEP, What.STAY, What.CLEAR)
"""Words about the batch, which others than rank 0 have only where all ranks decode."""


class Word(NamedTuple):
    """One thing to do."""

    what: What
    key: int = 0
    start: int = 0
    length: int = 0
    """Tokens of state `key`, where it is to be kept; steps, of `AHEAD`."""
    ids: Tensor | None = None
    """int64 ``[T]``, T ≥ 1, on the CPU."""


class Ranks:
    """The line from rank 0 to the others. Collective: every rank makes one.

    Args:
        cp: the ranks; on GPUs all of the job's. None: this process alone, which has nobody to tell.

    Raises:
        ArgumentError: some ranks of a job on GPUs.
    """

    def __init__(self, cp: ContextParallel | None) -> None:
        check_kind("cp", cp, ContextParallel, optional=True)
        self.comm: Group | None = None
        self._came = DONE  # what came of what was done last, where it is compared with the next word
        self._spoken = time.monotonic()
        if cp is not None and cp.size > 1:
            if not cp.comm.on_cuda:
                self.comm = cp.comm
            elif cp.size == dist.get_world_size():
                self.comm = Group(dist.new_group(backend="gloo", timeout=cp.timeout), cp.timeout, "torch")
            else:
                raise ArgumentError("cp", "all ranks of the job", f"{cp.size} of {dist.get_world_size()}")

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.comm is None or self.comm.rank == 0

    def tell(self, word: Word) -> bool:
        """On rank 0: all ranks hear `word`. Returns whether one of them was told to stop.

        Raises:
            PeerError: a rank died, or did not listen within the timeout.
        """
        if self.comm is None:
            return False
        length = word.length if word.ids is None else len(word.ids)
        few = word.ids is not None and length <= INLINE
        others = self._exchange((word.what, word.key, word.start, length), word.ids if few else None)[1:]
        if word.ids is not None and not few:
            self.comm.exchange({r: word.ids for r in range(1, self.comm.size)}, {}).wait()
        self._spoken = time.monotonic()
        return bool((others[:, 0] == What.STOP).any())

    def tell_in_time(self) -> bool:
        """On rank 0: say `NOTHING` if nothing was said for a while; returns as `tell`."""
        quiet = self.comm is None or time.monotonic() - self._spoken < PAUSE
        return False if quiet else self.tell(Word(What.NOTHING))

    def hear(self, stop: bool = False) -> Word:
        """On the other ranks: what rank 0 says next. `stop`: this rank was told to stop, so rank 0 should."""
        said = self._exchange((What.STOP if stop else What.NOTHING, 0, 0, 0))[0]
        what, key, start, length = said[:4].tolist()
        ids = None
        if what in TOKENS and length <= INLINE:
            ids = said[5 : 5 + length]
        elif what in TOKENS:
            ids = self.comm.recv((length,), torch.int64, torch.device("cpu"), 0).wait()
        return Word(What(what), key, start, length, ids)

    def agree(self, error: Exception | None) -> None:
        """On all ranks: what they were told to do is done, or failed.

        Raises:
            DisagreementError: not with the same error everywhere, so that messages may have been left half exchanged.
            PeerError: a rank died, or did not say so within the timeout.
        """
        if self.comm is not None:
            said = _outcome(error)
            self._compare(self.comm.all_gather(torch.tensor([_digest(said)], device="cpu")).wait(), said)

    def agree_later(self, error: Exception | None) -> None:
        """The same, with the next word: before anything else is done, and at no message's cost."""
        self._came = _outcome(error)

    def any_error(self, error: Exception | None) -> Exception | None:
        """On all ranks: the error that the first of them had, if any had one; where no message can be half exchanged.

        Raises:
            PeerError: a rank died, or did not say so within the timeout.
        """
        if self.comm is None or not self.comm.all_gather(torch.tensor([error is not None], device="cpu")).wait().any():
            return error
        said = "" if error is None else f"rank {self.comm.rank}: {type(error).__name__}: {error}"
        return RuntimeError(next(text for text in self.comm.agreement.tell(said) if text))

    def _exchange(self, row: tuple[int, int, int, int], ids: Tensor | None = None) -> Tensor:
        """Every rank's four numbers, what came of what it did last, and `INLINE` tokens ``[P, 5 + INLINE]``.

        Raises:
            DisagreementError: something else came of it on another rank.
        """
        came, self._came = self._came, DONE
        said = torch.zeros(5 + INLINE, dtype=torch.int64, device="cpu")
        said[:5] = torch.tensor((*row, _digest(came)), device="cpu")
        if ids is not None:
            said[5 : 5 + len(ids)] = ids
        told = self.comm.all_gather(said).wait()
        self._compare(told[:, 4], came)
        return told

    def _compare(self, told: Tensor, said: str) -> None:
        if bool((told != told[0]).any()):
            self.comm.agreement.agree("what came of a request", said)


def _outcome(error: Exception | None) -> str:
    return DONE if error is None else f"{type(error).__name__}: {error}"


def _digest(said: str) -> int:
    return zlib.crc32(said.encode())
