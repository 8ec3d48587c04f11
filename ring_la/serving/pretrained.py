"""A causal model of Transformers, served.

Its caches become rows (`integrations.transformers.sequences`), so that its sequences are decoded side by side, read in
pieces and kept like a `HybridLM`'s. Whether that is so of a model is not believed but measured, when it is loaded: two
short sequences are decoded side by side and one is read in pieces, and the results compared with each read and decoded
alone; under several ranks first with keys that stay on the rank that read them. What a model cannot, or does otherwise,
is not done with it, and the log says why.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..choices import LayoutKind
from ..context import ContextParallel
from ..errors import UnsupportedError
from ..inference import Prefilled
from .batch import Batch, Row
from .model import FATAL, keys_stay
from .tiers import Home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
PROBED = 5
"""Tokens a rank reads in the trial, of a first piece."""
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far logits may be apart, relative to their size, and still be rounding; of other dtypes `CLOSE_OTHERWISE`."""
CLOSE_OTHERWISE = 0.1


class Pretrained:
    """A causal model of Transformers. Collective.

    Args:
        model: as it was loaded, whole, or by `load_sharded`. cp: the ranks prompts will be split over; the model is
            made to run so.

    Raises:
        UnsupportedError: `parallelize` refuses it, or its layers keep one sequence's states in themselves.
    """

    kind: LayoutKind = "zigzag"
    _rows: Any = None

    def __init__(self, model: PreTrainedModel, cp: ContextParallel | None) -> None:
        config = model.config.get_text_config()
        self.vocab_size, self.device = config.vocab_size, model.device
        self.max_tokens = getattr(config, "max_position_embeddings", None)
        self.model: Any = model.eval()
        self._cp = None if cp is None or cp.size == 1 else cp
        self.shares_weights = hasattr(model, "_ring_la_weights")
        if self._cp is not None and not self.shares_weights:
            from ..integrations.transformers import parallelize

            parallelize(model, self._cp)
        self._alone = _OneByOne(model, split=self._cp is not None)
        self._way: Any = self._alone
        self.flexible = self._found("decoded alone", self._make_rows)
        self.shares_keys = self.flexible and self._may_share() and self._shared()
        if not self.shares_keys:
            self.flexible = self.flexible and self._found("decoded alone", self._try_rows)
            self.resumes = self.flexible and self._found("read in one piece", self._try_pieces)
            self.goes_on = self.resumes and (self._cp is None or self._rows.goes_on)
        if not self.flexible:
            self._way = self._alone

    def read(self, ids: Tensor, states: Any, cp: ContextParallel | None) -> Prefilled:
        return self._way.read(ids, states)

    def step(self, tokens: Tensor, states: Any, in_place: bool) -> Prefilled:
        return self._way.step(tokens, states, in_place)

    def home(self, cp: ContextParallel | None) -> Home:
        keys = self._rows.keys if self.shares_keys else None
        return Home(self.device, keys, {} if keys is None else dict.fromkeys(self._rows.sizes))

    def whole(self, earlier: int, lengths: Sequence[int]) -> bool:
        if earlier == 0:
            return min(lengths) == 0
        return min(lengths) < 2 or not self.goes_on

    # -- the trial -----------------------------------------------------------------------------------------

    def _found(self, otherwise: str, attempt: Callable[[], None]) -> bool:
        """Whether something works, on all ranks; else the log says what is done instead."""
        why = ""
        try:
            attempt()
        except FATAL:
            raise
        except Exception as error:  # a model of somebody else's may fail in its own way
            why = f"{type(error).__name__}: {error}"
        if (
            self._cp is not None
            and self._cp.comm.all_reduce(torch.tensor([float(bool(why))], device=self.device)).wait()
        ):
            why = why or "another rank could not otherwise"
        if why:
            LOG.warning("sequences of %s are %s: %s", type(self.model).__name__, otherwise, why)
        return not why

    def _make_rows(self) -> None:
        """Have sequences as rows."""
        from ..integrations.transformers.rotary import goes_by_length
        from ..integrations.transformers.sequences import Sequences

        if any(goes_by_length(module) for module in self.model.modules()):
            raise ValueError("rotary frequencies go by the longest sequence")
        self._way = self._rows = Sequences(self.model)

    def _may_share(self) -> bool:
        """Whether there are keys that could stay on their ranks: what is read after them is split, too."""
        return keys_stay(bool(self._rows.sizes), self._cp) and self._rows.goes_on

    def _shared(self) -> bool:
        """Whether sequences whose keys stay on their ranks are decoded and read in pieces; if not, keys are whole."""

        def attempt() -> None:
            self._rows.share(self._cp)
            self._try_rows()
            self._try_pieces()

        self.resumes = self.goes_on = self._found("remembered whole on every rank", attempt)
        if not self.goes_on:
            self._rows.share(None)
        return self.goes_on

    def _try_rows(self) -> None:
        """Two sequences side by side against each alone."""
        rows, alone = self._rows, self._alone
        batch, want = Batch(self), []
        for length in (self._length(0), 2):
            ids = self._ids(length)
            got = rows.read(ids, None)
            want.append(alone.read(ids, None))
            same_logits(got.logits, want[-1].logits)
            batch.add(Row(), got)
        tokens = [3 % self.vocab_size, 5 % self.vocab_size]
        for _ in range(2):
            batch.step(tokens)
            for i, token in enumerate(tokens):
                want[i] = alone.step(torch.tensor([token], device=self.device), want[i].states, False)
                same_logits(batch.logits[i : i + 1], want[i].logits)

    def _try_pieces(self) -> None:
        """A prompt in three pieces, the last of one token, against the whole."""
        ranks = 1 if self._cp is None else self._cp.size
        first, second = self._length(0), self._length(2 * ranks + 1)
        ids = self._ids(second + 1)
        states = None
        for begin, end in ((0, first), (first, second), (second, second + 1)):
            if begin < end:
                got = self._way.read(ids[:, begin:end], states)
                states = got.states
        same_logits(got.logits, self._alone.read(ids, None).logits)

    def _length(self, more: int) -> int:
        """Tokens of a prompt of the trial, and some more, as far as the model has places for them and three others."""
        ranks = 1 if self._cp is None else self._cp.size
        return max(1, min(PROBED * ranks + more, (self.max_tokens or 2**62) - 3))

    def _ids(self, length: int) -> Tensor:
        return torch.arange(1, length + 1, device=self.device)[None] * 7 % self.vocab_size


class _OneByOne:
    """A model whose cache is one sequence's, and grows: its states are the cache, and how many tokens it has."""

    goes_on = False

    def __init__(self, model: PreTrainedModel, split: bool) -> None:
        from ..integrations.transformers.mixers import of_one_sequence
        from ..integrations.transformers.names import cache_name
        from ..integrations.transformers.sequences import go_on_alone

        if (kind := of_one_sequence(model)) is not None:
            raise UnsupportedError(
                "model", "one that has all it remembers in its cache", kind, "Transformers 5.23 has it"
            )
        if not split:
            go_on_alone(model)
        self._model: Any = model
        self._takes = inspect.signature(model.forward).parameters
        self._cache = cache_name(model.forward)  # until the model says otherwise
        self._forgets = False
        self._last = {"logits_to_keep": 1} if split or "logits_to_keep" in self._takes else {}
        self._places = "position_ids" in self._takes  # not all models count on from what is in their cache

    @torch.no_grad()
    def read(self, ids: Tensor, states: None) -> Prefilled:
        from transformers.cache_utils import DynamicCache

        given = {self._cache: DynamicCache(config=self._model.config)} if self._forgets else {}
        out = self._model(input_ids=ids, use_cache=True, **given, **self._last)
        if self._cache not in out and not given:
            other = next((name for name in out if name in self._takes), None)  # what it returns and takes again
            self._cache, self._forgets = other or self._cache, other is None
            return self.read(ids, states)
        return Prefilled(out.logits[:, -1], [out.get(self._cache, given.get(self._cache)), ids.shape[1]])

    @torch.no_grad()
    def step(self, tokens: Tensor, states: Any, in_place: bool) -> Prefilled:
        cache, length = states
        keywords: dict[str, Any] = {self._cache: cache}
        if self._places:
            keywords["position_ids"] = torch.full_like(tokens[:, None], length)
        out = self._model(input_ids=tokens[:, None], use_cache=True, **keywords)
        return Prefilled(out.logits[:, -1], [out.get(self._cache, cache), length + 1])


def same_logits(got: Tensor, want: Tensor) -> None:
    """Refuse logits that are further apart than rounding brings them."""
    bound = CLOSE.get(want.dtype, CLOSE_OTHERWISE)
    apart = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    if not apart <= bound:
        raise ValueError(f"else logits are {apart:.1e} of their size apart, more than {bound:.0e}")
