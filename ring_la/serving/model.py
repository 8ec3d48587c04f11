"""What a server needs of a model: read a prompt on all ranks, then one token more of each of several."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..checks import check_has, check_kind
from ..choices import LayoutKind
from ..context import ContextParallel
from ..errors import DisagreementError, PeerError, UnsupportedError
from ..inference import KeyStore, Prefilled, key_store, prefill, step
from ..inference.sharded_hybrid import HybridWeights
from ..models import HybridLM
from ..models.checks import check_model
from ..nn import KVCache, Layer
from ..nn.decoding import KeyedLayer
from .tiers import Home

FATAL = (PeerError, DisagreementError, torch.AcceleratorError)
"""After these nothing can be trusted any more."""


class Served(Protocol):
    """A model to decode with.

    Attributes:
        vocab_size: number of tokens. device: where it is.
        model: the module itself.
        max_tokens: the most tokens a sequence may have; None: any number.
        flexible: whether several sequences' states can be joined to decode as a batch; they have a row each.
        resumes: whether a prompt is read on from a state, more than once if need be.
        goes_on: whether that is split over the ranks, too.
        kind: the layout that `read` splits a prompt by.
        shares_keys: whether keys stay on the rank that reads them where there are several, and all decode together.
        shares_weights: whether each rank has a part of the weights, so that all decode together.
    """

    model: nn.Module
    vocab_size: int
    device: torch.device
    max_tokens: int | None
    flexible: bool
    resumes: bool
    goes_on: bool
    kind: LayoutKind
    shares_keys: bool
    shares_weights: bool

    def read(self, ids: Tensor, states: Any, cp: ContextParallel | None) -> Prefilled:
        """Read a prompt ``ids [1, T]``, which every rank has whole. Collective."""

    def step(self, tokens: Tensor, states: Any, in_place: bool) -> Prefilled:
        """Read one more token of each sequence, ``tokens [N]``. Collective where keys or weights are shared out over
        ranks."""

    def home(self, cp: ContextParallel | None) -> Home:
        """Where its states are, on these ranks."""

    def whole(self, earlier: int, lengths: Sequence[int]) -> bool:
        """Whether every rank reads all of a piece after `earlier` tokens, of which a layout gives ranks `lengths`."""


def check_served(model: object) -> None:
    """Refuse what is no `Served`."""
    wanted = ("read", "step", "home", "whole", *Served.__annotations__)
    check_has("model", model, wanted, "a model to serve, such as Hybrid(model) or what load gives")


def keys_stay(shares_keys: bool, cp: ContextParallel | None) -> bool:
    """Whether keys stay on the rank that reads them, and all ranks decode. Not where bits are to be those of any number
    of ranks: what these attend to is merged, and rounding goes by their number."""
    return shares_keys and cp is not None and cp.size > 1 and not cp.deterministic


class Hybrid:
    """A `HybridLM`, whose states are tensors with one row a sequence; under several ranks keys are in a `KeyStore`.

    Args:
        weights: of which each rank has a part; None: it has all.
    """

    flexible = resumes = goes_on = True
    max_tokens = None

    def __init__(self, model: HybridLM, weights: HybridWeights | None = None) -> None:
        check_model(model)
        check_kind("weights", weights, HybridWeights, optional=True)
        self.model = model.eval()
        self._weights, self.shares_weights = weights, weights is not None
        self.vocab_size = model.config.vocab_size
        self.device = model.embedding.weight.device
        attention = any(isinstance(layer, Layer) and layer.state_type is KVCache for layer in model.modules())
        self.kind: LayoutKind = "zigzag" if attention else "contiguous"  # balanced, or as few segments as can be
        self.shares_keys = attention
        self._keys: KeyStore | None = None

    def read(self, ids: Tensor, states: list[Any] | None, cp: ContextParallel | None) -> Prefilled:
        if cp is None:
            return prefill(self.model, ids, states=states)
        layout, keys = cp.layout(ids.shape[1], self.kind), self._store(cp) if states is None else None
        with self._call(cut=False):
            return prefill(self.model, layout.shard(ids), states=states, layout=layout, keys=keys)

    def home(self, cp: ContextParallel | None) -> Home:
        keys = self._store(cp)
        layers = {i: block.layer for i, block in enumerate(self.model.blocks) if isinstance(block.layer, KeyedLayer)}
        apart = frozenset(i for i, layer in layers.items() if not layer.kept_alike)
        return Home(self.device, keys, {} if keys is None else layers, apart)

    def _store(self, cp: ContextParallel | None) -> KeyStore | None:
        """Where keys stay on the rank that reads them; None: they do not."""
        if self._keys is None and keys_stay(self.shares_keys, cp):
            self._keys = key_store(self.model, cp)
        return self._keys

    def whole(self, earlier: int, lengths: Sequence[int]) -> bool:
        return False

    def step(self, tokens: Tensor, states: list[Any], in_place: bool) -> Prefilled:
        with self._call(cut=True):
            return step(self.model, tokens, states, in_place=in_place)

    def _call(self, cut: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._weights is None else self._weights.call(cut)


REHEARSED = 4
"""Tokens a rank reads to see that a model can be served."""


def rehearse(model: Served, cp: ContextParallel | None) -> None:
    """Read a prompt and one token more, before anybody is told that the model is there. Collective.

    Raises:
        UnsupportedError: the model cannot do that; on every rank. DisagreementError: the ranks have other models, or
        other weights, as far as the first row of each says so.
    """
    if cp is not None and cp.size > 1:
        cp.comm.agreement.agree("the model that is served", told(model))
    length = REHEARSED * (1 if cp is None else cp.size)
    ids = torch.arange(min(length, (model.max_tokens or length + 1) - 1), device=model.device)[None] % model.vocab_size
    try:
        prompt = model.read(ids, None, cp)
        model.step(prompt.logits.argmax(-1), prompt.states, in_place=False)
    except (PeerError, DisagreementError):
        raise
    except Exception as error:  # a model of somebody else's may fail in its own way
        name, hint = type(model.model).__name__, "" if cp is None or cp.size == 1 else "Perhaps one rank can serve it"
        got = f"{name}, which does not ({type(error).__name__}: {error})"
        raise UnsupportedError("model", "one that reads a prompt and goes on from there", got, hint) from error


def told(model: Served) -> dict[str, object]:
    """What a model is, to compare: no part of its weights where ranks share them out."""
    weights = [] if model.shares_weights else [p.detach() for p in model.model.parameters()]
    rows = [_first_row(p).contiguous().view(torch.uint8).sum() for p in weights if type(p) is Tensor and p.numel()]
    sums = torch.stack(rows).tolist() if rows else []
    config = getattr(model.model, "config", None) if isinstance(model.model, HybridLM) else None
    return {
        "class": type(model.model).__name__,
        "config": None if config is None else config.to_dict(),
        "vocab_size": model.vocab_size,
        "max_tokens": model.max_tokens,
        "weights": f"{zlib.crc32(str(sums).encode()):08x}",
    }


def _first_row(x: Tensor) -> Tensor:
    while x.dim() > 1:
        x = x[0]
    return x[None] if x.dim() == 0 else x
