"""From what a reader's ranks hand over into the pages of vLLM's layers, on one of its workers.

Keys and values, and latents with their rotary keys, go through the layer's own ``do_kv_cache_update``, whatever
attention kernel keeps them in whatever order; a recurrence's states are copied into the block of the sequence. Of a
tensor-parallel vLLM each worker takes its own heads and channels, and all latents. Layers are used by their attributes;
vLLM itself is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from .memory import mapped
from .parcels import KEYS, LaidTensor, places
from .states import WorkerPart, layout, write_states

NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
"""A layer's number in the name vLLM gives it."""


@dataclass(frozen=True)
class SequenceBlocks:
    """A sequence's blocks in one group of layers.

    Attributes:
        ids: each block's number; −1: there is none (a window has left it behind). size: tokens of a block.
    """

    ids: Sequence[int]
    size: int

    def slots(self, tokens: Tensor) -> Tensor:
        """Where tokens at these places lie, int64 ``[n]``; negative: nowhere."""
        blocks = torch.tensor(self.ids, dtype=torch.int64, device="cpu")[tokens // self.size]
        return torch.where(blocks < 0, -1, blocks * self.size + tokens % self.size)

    def of_span(self, tokens: Tensor, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Which of the tokens at these places are in the span and have a block, and where they lie."""
        slots = self.slots(tokens)
        stay = ((tokens >= span[0]) & (tokens < span[1]) & (slots >= 0)).nonzero().flatten()
        return stay, slots[stay]

    def state(self, tokens: int) -> int:
        """The block with what a recurrence remembers of the first `tokens` tokens.

        Raises:
            ArgumentError: there is none.
        """
        at = (tokens - 1) // self.size
        if at >= len(self.ids) or self.ids[at] < 0:
            raise ArgumentError("blocks", f"one for the state after {tokens} tokens, the {at}th", list(self.ids))
        return self.ids[at]


class HandedOver:
    """What all ranks of a reader hand over of one prompt, mapped here.

    Args:
        parcels: as the reader sent them. device: of vLLM's worker. reach: from a handle to the memory, seen from here.

    Raises:
        ArgumentError, UnsupportedError: they are no parcels, or out of reach.
    """

    def __init__(
        self,
        parcels: Sequence[Mapping[str, Any]],
        device: torch.device,
        reach: Callable[[dict[str, Any], torch.device], Tensor] = mapped,
    ) -> None:
        self.keys: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.latent: set[int] = set()  # the layers whose keys are latents, and rotary keys in place of values
        self.states: dict[int, dict[tuple[str, int], Tensor]] = {}
        for parcel in parcels:
            memory, tokens = reach(parcel["memory"], device), places(parcel["tokens"])
            pieces = [LaidTensor.from_json(said, len(memory)) for said in parcel["pieces"]]
            key, value, latent, rotary = ({p.layer: p for p in pieces if p.kind == kind} for kind in KEYS)
            self.latent |= latent.keys()
            for layer, piece in (key | latent).items():
                if len(tokens) != piece.shape[0]:
                    raise ArgumentError("tokens", f"the places of {piece.shape[0]} keys", len(tokens))
                other = (value | rotary)[layer].of(memory)
                self.keys.setdefault(layer, []).append((tokens, piece.of(memory), other))
            for piece in pieces:
                if piece.kind not in KEYS:
                    self.states.setdefault(piece.layer, {})[piece.kind, piece.place] = piece.of(memory)

    def numbered(self, layers: Mapping[str, Any]) -> dict[str, int]:
        """The number in the reader's model of each of vLLM's layers, by name.

        Where a name does not say it (Falcon-H1's mixers, Zamba2's attention) the layers of that kind are those of the
        reader's in the same order.

        Raises:
            UnsupportedError: the reader has nothing for such a layer.
        """
        numbers: dict[str, int] = {}
        for kind, known in (("state", self.states), ("keys", self.keys)):
            names = [name for name, layer in layers.items() if hasattr(layer, "mamba_type") == (kind == "state")]
            said = {name: NUMBER.search(name) for name in names}
            numbers |= {name: int(found[1]) for name, found in said.items() if found}
            silent = sorted((name for name in names if not said[name]), key=_digits)
            left = sorted(known.keys() - {numbers[name] for name in names if said[name]})
            if silent and len(silent) != len(left):
                raise UnsupportedError("reader", f"the model vLLM has, with {kind} of {silent}", f"those of {left}")
            numbers |= dict(zip(silent, left))
            absent = next((name for name in names if numbers[name] not in known), None)
            if absent is not None:
                raise UnsupportedError("reader", f"the model vLLM has, with {kind} of {absent}", "none")
        return numbers

    def write(self, number: int, layer: Any, blocks: SequenceBlocks, span: tuple[int, int], part: WorkerPart) -> None:
        """Into the pages of one layer.

        Args:
            number: in the reader's model. layer: vLLM's module. blocks: of the layer's group.
            span: tokens from, to: those before are there already. part: this worker's.

        Raises:
            UnsupportedError: what the reader has does not have a shape that the layer takes.
        """
        if hasattr(layer, "mamba_type"):
            write_states(layer, self.states[number], blocks.state(span[1]), part)
            return
        for tokens, k, v in self.keys[number]:
            if number in self.latent:
                write_latents(layer, (k, v), tokens, blocks, span)
            else:
                write_keys(layer, (k, v), tokens, blocks, span, part)


def check_layers(layers: Mapping[str, Any]) -> None:
    """Refuse a vLLM, before it takes requests, with layers that nothing can be written into.

    Args:
        layers: vLLM's modules that have pages, by name.

    Raises:
        UnsupportedError: the first such layer, by name and kind.
    """
    for name, layer in layers.items():
        if hasattr(layer, "mamba_type"):
            layout(layer, name)
        elif not (hasattr(layer, "num_kv_heads") or hasattr(layer, "kv_lora_rank")):  # an indexer's, among others
            expected = "keys and values of heads, latents, and recurrent states in all layers"
            raise UnsupportedError("model", expected, f"{name}, a {type(layer).__name__}")
        elif not hasattr(layer.impl, "do_kv_cache_update"):
            expected = "an attention backend whose kernels write keys apart from attending to them"
            raise UnsupportedError("attention_backend", expected, f"{type(layer.impl).__name__} in {name}")


def _digits(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def write_keys(
    layer: Any,
    keys: tuple[Tensor, Tensor],
    tokens: Tensor,
    blocks: SequenceBlocks,
    span: tuple[int, int],
    part: WorkerPart,
) -> None:
    """Keys and values ``[T, H, D]`` of tokens at these places into an attention layer's pages."""
    if not hasattr(layer, "num_kv_heads") or not hasattr(layer.impl, "do_kv_cache_update"):
        expected = "layers with keys and values of heads, whose kernels write them apart"
        raise UnsupportedError("model", expected, type(layer.impl).__name__)
    stay, slots = blocks.of_span(tokens, span)
    if not len(stay):
        return
    cache = layer.kv_cache
    dtype = getattr(layer, "dtype", None) or (cache.dtype if cache.dtype.is_floating_point else None)
    k, v = (
        part.cut(x, 1, layer.num_kv_heads)[stay.to(x.device)].to(device=cache.device, dtype=dtype or x.dtype)
        for x in keys
    )
    layer.impl.do_kv_cache_update(layer, k, v, cache, slots.to(cache.device))


def write_latents(
    layer: Any, latents: tuple[Tensor, Tensor], tokens: Tensor, blocks: SequenceBlocks, span: tuple[int, int]
) -> None:
    """Latents ``[T, 1, L]`` and rotary keys ``[T, 1, R]`` of tokens at these places into a latent attention's pages,
    which every worker has whole."""
    sizes = tuple(getattr(layer, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    got = tuple(x.shape[-1] for x in latents)
    if got != sizes or not hasattr(layer.impl, "do_kv_cache_update"):
        raise UnsupportedError("model", f"latent attention of {got} channels", f"{type(layer).__name__} of {sizes}")
    stay, slots = blocks.of_span(tokens, span)
    if not len(stay):
        return
    cache = layer.kv_cache
    kept = layer.kv_cache_dtype  # "auto": the model's
    mine = (x[stay.to(x.device)].to(cache.device, cache.dtype if kept == "auto" else x.dtype) for x in latents)
    latent, rotary = mine
    layer.impl.do_kv_cache_update(latent[:, 0], rotary, cache, slots.to(cache.device), kept, layer._k_scale)
