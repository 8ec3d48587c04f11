"""The ranks that read prompts for vLLM. Collective: every rank makes a `Reader` and calls `run`.

Rank 0 takes prompts from its `Desk`, one after the other; all ranks read them, each its own tokens, and lay what their
tokens left into memory that vLLM maps (`integrations.vllm.memory`). Nothing is gathered but convolutions' inputs at the
last tokens; the state of a recurrence comes out on every rank anyway. Words travel as the server's (`ranks`).

An error that all ranks have fails that prompt; any other ends the reader on all of them, and vLLM goes on without.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...context import ContextParallel
from ...errors import ArgumentError, PeerError
from ...integrations.transformers import parallelize
from ...integrations.transformers.cache import RankCache, Remembered
from ...integrations.transformers.mixers.latents import in_pairs, latent_layers
from ...integrations.vllm.hosts import Registered
from ...integrations.vllm.memory import Shared
from ...integrations.vllm.parcels import planned, runs
from ..model import FATAL
from ..ranks import PAUSE, Ranks, What, Word
from .desk import AskedPrompt, Desk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)


class Reader:
    """A causal model of Transformers that reads prompts for another engine.

    Args:
        model: as it was loaded, with the weights vLLM has; `parallelize` splits its calls, unless it has done so.
        cp: the ranks. parent: the folder for CPU memory (`memory.Shared`).
        hosts: whether vLLM may be on other hosts, which needs NIXL (`hosts.Registered`).

    Attributes:
        desk: where rank 0 is asked. least: the fewest tokens that are split over these ranks.

    Raises:
        ArgumentError, UnsupportedError: the model cannot run split, or leaves what no other engine can take.
    """

    def __init__(
        self, model: PreTrainedModel, cp: ContextParallel, parent: Path | None = None, hosts: bool = False
    ) -> None:
        config = model.config.get_text_config()
        self.cp, self.desk, self.least = cp, Desk(), 2 * cp.size
        self.vocab_size, self.longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
        self.model = model.eval() if hasattr(model, "_ring_la") else parallelize(model.eval(), cp)
        self._latents = latent_layers(self.model)
        self._device = model.device
        self.ranks = Ranks(cp)
        self._memory = Registered(model.device) if hosts else Shared(model.device, parent)
        self._comm = self.ranks.comm
        self._stop, self._last = threading.Event(), 0
        self._rehearse()

    # -- rank 0, any thread --------------------------------------------------------------------------------

    def check(self, ids: Tensor) -> None:
        """Whether a prompt ``ids [T]`` can be read.

        Raises:
            ArgumentError: no.
        """
        most = self.longest or len(ids)
        if not self.least <= len(ids) <= most:
            raise ArgumentError("prompt", f"{self.least} to {most} tokens", len(ids))
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            got = f"{int(ids.min())} to {int(ids.max())}"
            raise ArgumentError("prompt", f"token ids from 0 to {self.vocab_size - 1}", got)

    def about(self) -> dict[str, Any]:
        """What it says of itself."""
        numbers = {"least": self.least, "longest": self.longest, "waiting": self.desk.waiting}
        return {"ranks": self.cp.size, "held": self._memory.held} | numbers

    def stop(self) -> None:
        """Return from `run` after the prompt that is being read; any rank, any thread."""
        self._stop.set()

    # -- every rank ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read until `stop` is called on any rank.

        Raises:
            PeerError: a rank died or stalled; DisagreementError: a prompt failed on some ranks, or otherwise than on
                others. Prompts under way have failed.
        """
        why = "the reader has stopped"
        try:
            if not self.ranks.leads:
                self._follow()
                return
            while not self._stop.is_set():
                self._turn()
            self.ranks.tell(Word(What.STOP))
        except PeerError:
            why = "the reader has lost a rank"
            raise
        except BaseException as error:
            why = f"the reader has failed ({type(error).__name__})"
            raise
        finally:
            self.desk.close(why)
            self._memory.close()

    def _follow(self) -> None:
        while True:
            word = self.ranks.hear(self._stop.is_set())
            if word.what == What.STOP:
                return
            if word.what == What.READ:
                self._read(word)
            elif word.what == What.DROP:
                self._memory.drop(word.key)

    def _turn(self) -> None:
        """What nobody needs is forgotten, and the next prompt is read."""
        if self.ranks.tell_in_time():
            self.stop()
        for key in self.desk.forget():
            self.ranks.tell(Word(What.DROP, key))
            self._memory.drop(key)
        asked = self.desk.next(self._last + 1, PAUSE / 2)
        if asked is not None:
            self._last += 1
            self._answer(asked)

    def _answer(self, asked: AskedPrompt) -> None:
        word, start = Word(What.READ, asked.key, ids=asked.ids), time.monotonic()
        if self.ranks.tell(word):
            self.stop()
        parcels, error = self._read(word)
        self.desk.finish(asked, parcels, error)
        took = f"{len(asked.ids)} tokens in {time.monotonic() - start:.3f} s"
        LOG.info("read %s" if error is None else "could not read %s: " + str(error), took)

    def _read(self, word: Word) -> tuple[list[dict[str, Any]], str | None]:
        """Read a prompt and lay it down: every rank's parcel, or why there are none."""
        cache, error = RankCache(), None
        try:
            self._forward(word.ids, cache)
        except FATAL:
            raise
        except Exception as e:  # of whatever kind: it is the prompt's, if all have it
            error = e
        self.ranks.agree(error)
        if error is not None:
            return [], f"{type(error).__name__}: {error}"
        said = self._lay(word.key, cache)
        told = [said] if self._comm is None else list(map(json.loads, self._comm.agreement.tell(json.dumps(said))))
        failed = next((parcel["error"] for parcel in told if "error" in parcel), None)
        if failed is not None:
            self._memory.drop(word.key)
            return [], failed
        return told, None

    @torch.no_grad()
    def _forward(self, ids: Tensor, cache: RankCache) -> None:
        ids = ids[None].to(self._device)
        split: Any = self.model._ring_la
        self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{split.cache.name: cache})

    def _lay(self, key: int, cache: RankCache) -> dict[str, Any]:
        """This rank's parcel, laid into memory; or why it was not, which is this rank's alone."""
        layout, rank = cache.layout, self.cp.rank
        last = int(layout.owners_of(torch.tensor([layout.seq_len - 1], device="cpu"))[0])
        try:
            tensors = [self._handed(entry) for entry in cache.entries if rank == last or _of_tokens(entry)]
            pieces, size = planned(tensors)
            memory, handle = self._memory.room(key, size)
            for piece, (*_, tensor) in zip(pieces, tensors):
                piece.of(memory).copy_(tensor)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # before another process reads it
        except (OSError, ArgumentError, torch.OutOfMemoryError) as error:
            return {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        tokens = runs(layout.local_tokens.cpu())
        return {"rank": rank, "tokens": tokens, "memory": handle, "pieces": [piece.to_json() for piece in pieces]}

    def _handed(self, entry: Remembered) -> tuple[int, str, int, Tensor]:
        """An entry as it is laid down: without the batch, keys and values token by token."""
        x, kind = entry.tensor[0], entry.kind
        if not _of_tokens(entry):
            return entry.layer, kind, entry.place, x
        if entry.layer in self._latents:
            kind = "latent" if kind == "key" else "rotary"
            x = in_pairs(x) if kind == "rotary" and self._latents[entry.layer] else x
        return entry.layer, kind, entry.place, x.transpose(0, 1)

    def _rehearse(self) -> None:
        """Read a few tokens, before anybody is told that the reader is there."""
        ids = torch.arange(min(4 * self.cp.size, self.longest or 4 * self.cp.size), device="cpu") % self.vocab_size
        self._forward(ids, RankCache())


def _of_tokens(entry: Remembered) -> bool:
    """Whether it is of this rank's tokens; what is not is the same on every rank."""
    return entry.kind in ("key", "value")
