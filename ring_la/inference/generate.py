"""Prefill under a layout, then decode token by token from the states it handed over.

A prompt may be long: its tokens are split over the ranks, and each layer's state after the last token (recurrent
state, tail of the convolution, keys and values) comes out on every rank. Decoding needs nothing but those states, so
any rank can do it alone. With a `KeyStore` keys and values stay on the rank that read them instead: room for them grows
with the number of ranks, and all ranks decode together. Packed prompts come out as a batch of N rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_int, check_kind, check_least, is_finite, is_int
from ..context import ContextParallel, ShardedLayout
from ..errors import ArgumentError, describe_tensor
from ..keystore import KeyStore, rows_of, with_rows
from ..models import HybridLM
from ..models.checks import check_model
from ..nn.decoding import KeyedLayer
from ..nn.layer import last_tokens


class Prefilled(NamedTuple):
    """A prompt, read: all that decoding needs."""

    logits: Tensor
    """Of the token after each document's last, ``[N, vocab_size]``."""
    states: list[Any]
    """What each layer remembers of each document."""


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen from logits.

    Attributes:
        temperature: 0: the most likely token; else sample from softmax(logits / temperature).
        top_k: among this many of the likeliest; None: all.
        top_p: among the likeliest that together have this probability (Holtzman et al. 2020, arXiv 1904.09751, §3.1),
            counted after the temperature and top_k; 1: all.
        generator: randomness to draw from. Ranks that decode side by side need equal ones to draw alike.
    """

    temperature: float = 0.0
    top_k: int | None = None
    generator: torch.Generator | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_kind("generator", self.generator, torch.Generator, optional=True)
        if self.top_k is not None and not is_int(self.top_k, 1):
            raise ArgumentError("top_k", "an int ≥ 1 or None", repr(self.top_k))
        if not is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", "a number above 0 and at most 1", repr(self.top_p))

    @property
    def greedy(self) -> bool:
        """Whether it takes the most likely token."""
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens ``[N]`` from logits ``[N, vocab_size]``."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.weights(logits), 1, generator=self.generator)[:, 0]

    def weights(self, logits: Tensor) -> Tensor:
        """Probabilities ``[N, vocab_size]`` that tokens are drawn by, fp32, at a temperature above 0."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        weights = logits.softmax(-1)
        if self.top_p < 1:
            likeliest, order = weights.sort(-1, descending=True)
            before = likeliest.cumsum(-1) - likeliest
            out = (before >= self.top_p) & (before > 0)  # the likeliest stays, were top_p nothing in fp32
            weights = torch.zeros_like(weights).scatter(-1, order, likeliest.masked_fill(out, 0))
        return weights


def key_store(model: HybridLM, cp: ContextParallel | None = None) -> KeyStore:
    """Room for keys of a model's sequences, each token's on the rank that reads it.

    Keys and values, latents, and keys of blocks are shared out over the ranks of `cp` (None: this process has all);
    what recurrences remember, which has one size, is on each.
    """
    check_model(model)
    layers = [block.layer for block in model.blocks if isinstance(block.layer, KeyedLayer)]
    weight = model.embedding.weight
    return KeyStore([layer.key_size for layer in layers], cp, dtype=weight.dtype, device=weight.device)


@torch.no_grad()
def prefill(
    model: HybridLM,
    ids: Tensor,
    *,
    states: list[Any] | None = None,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    keys: KeyStore | None = None,
) -> Prefilled:
    """Read a prompt; every rank gets the result.

    Args:
        ids: int ``[B, T]``; under a layout this rank's tokens.
        states: what the layers remember of earlier tokens.
        layout: how the prompt is split. cu_seqlens: packed prompts on one device ``[N+1]``, none of them empty.
        keys: where keys and values are kept, on the rank that reads them (`key_store`); a layout is needed. None: every
            rank gets all of them, or they go where `states` has those before.

    Raises:
        ArgumentError: a wrong argument by name, a prompt without a token among them; under a layout on every rank.
    """
    check_model(model)
    model.check(ids, states, layout, cu_seqlens)
    if layout is None and ids.shape[1] == 0:
        raise ArgumentError("ids", "a prompt of at least one token", list(ids.shape))
    cu = cu_seqlens if layout is None else torch.tensor(layout.cu_seqlens, device="cpu")
    if cu is not None and bool((cu.diff() == 0).any()):
        raise ArgumentError("cu_seqlens", "prompts of at least one token", cu.tolist())
    states = _with_room(model, len(ids), states, layout, keys)
    x, after = model.hidden(ids, states=states, output_states=True, layout=layout, cu_seqlens=cu_seqlens)
    return Prefilled(model.logits(last_tokens(x, layout, cu_seqlens)), after or [])


def _with_room(
    model: HybridLM, rows: int, states: list[Any] | None, layout: ShardedLayout | None, keys: KeyStore | None
) -> list[Any] | None:
    """The states with room for the keys of a layout's tokens, where these stay on their ranks."""
    before = rows_of(states)
    if keys is None and before is None:
        return states
    if layout is None:
        raise ArgumentError("layout", "one, where keys stay on the rank that reads them", "None")
    if before is not None:
        return with_rows(states or [], before.extended(layout))
    layers = [block.layer.key_size for block in model.blocks if isinstance(block.layer, KeyedLayer)]
    if not isinstance(keys, KeyStore):
        raise ArgumentError("keys", "a KeyStore or None", type(keys).__name__)
    if keys.sizes != layers:
        raise ArgumentError("keys", f"a store of this model's layers, {layers} (key_store)", f"one of {keys.sizes}")
    if states is not None:
        raise ArgumentError("keys", "None where states are given that have theirs", "a KeyStore")
    new = keys.open(layout.num_documents if layout.packed else rows).extended(layout)
    numbers = iter(range(len(layers)))
    return [new[next(numbers)] if isinstance(block.layer, KeyedLayer) else None for block in model.blocks]


@torch.no_grad()
def step(model: HybridLM, tokens: Tensor, states: list[Any], *, in_place: bool = False) -> Prefilled:
    """Read one more token of each document, ``tokens [N]``. Collective where keys stay on their ranks.

    in_place: states of a fixed size are written over those given, instead of to new memory.
    """
    check_model(model)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        raise ArgumentError("tokens", "an int tensor [N], one token of each document", describe_tensor(tokens))
    rows = rows_of(states)
    if rows is not None:
        states = with_rows(states, rows.advanced(in_place))
    logits, after = model(tokens[:, None], states=states, output_states=True, in_place=in_place)
    return Prefilled(logits[:, -1], after or [])


def decode(model: HybridLM, prompt: Prefilled, max_new_tokens: int, sampler: Sampler | None = None) -> Iterator[Tensor]:
    """The tokens ``[N]`` that follow a prompt, one after the other. No communication: any rank may do it.

    Where keys stay on their ranks it is collective: all ranks take the same number of tokens, and those are rank 0's.
    The prompt keeps its states: the first step makes new ones, which the following overwrite.

    Raises:
        ArgumentError: by name.
    """
    check_int("max_new_tokens", max_new_tokens, 0)
    check_model(model)
    check_kind("prompt", prompt, Prefilled)
    if sampler is not None and not callable(sampler):
        raise ArgumentError("sampler", "a Sampler or None", describe_tensor(sampler))
    return _decode(model, prompt, max_new_tokens, sampler or Sampler())


@torch.no_grad()
def _decode(model: HybridLM, prompt: Prefilled, max_new_tokens: int, sampler: Sampler) -> Iterator[Tensor]:
    rows = rows_of(prompt.states)
    cp = None if rows is None else rows.store.cp
    for i in range(max_new_tokens):
        tokens = sampler(prompt.logits)
        if cp is not None:
            tokens = cp.comm.all_gather(tokens).wait()[0]  # whatever each rank has drawn
        yield tokens
        if i + 1 < max_new_tokens:
            prompt = step(model, tokens, prompt.states, in_place=i > 0)


def generate(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    *,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    keys: KeyStore | None = None,
) -> Tensor:
    """`prefill`, then `decode`: the new tokens ``[N, max_new_tokens]``."""
    prompt = prefill(model, ids, layout=layout, cu_seqlens=cu_seqlens, keys=keys)
    tokens = list(decode(model, prompt, max_new_tokens, sampler))
    return torch.stack(tokens, 1) if tokens else prompt.logits.new_zeros(len(prompt.logits), 0, dtype=torch.int64)
