"""What a rank hands over of a prompt: tensors one after the other in one memory, and a text that says which.

    parcel = {"rank": 0, "tokens": [[0, 128], [384, 512]], "memory": {...}, "pieces": [
        {"layer": 3, "kind": "key", "place": 0, "dtype": "bfloat16", "shape": [256, 8, 128], "at": 0}, ...]}

Keys and values are ``[T_local, H, D]``, those of the tokens `tokens` counts (from, to). So are the latents of latent
attention ``[T_local, 1, L]``, normed, and its "rotary" keys ``[T_local, 1, R]``, turned, in the order of channels that
their projection has (DeepSeek's pairs). "convolution" is the inputs of a short convolution at the prompt's last tokens
``[D, W]``, "recurrent" a recurrence's state after its last token. These two are handed over by the rank that has the
last token alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError

ALIGN = 256
"""Bytes that a tensor begins at a multiple of."""
KEYS = ("key", "value", "latent", "rotary")
"""What each rank has of its own tokens."""
KINDS = (*KEYS, "convolution", "recurrent")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class LaidTensor(NamedTuple):
    """One tensor: what it is, and where in the memory."""

    layer: int
    kind: str
    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor itself, a view of ``memory`` (uint8)."""
        return memory[self.at : self.at + self.size].view(self.dtype).view(self.shape)

    def to_json(self) -> dict[str, Any]:
        """As it is sent."""
        return self._asdict() | {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, said: dict[str, Any], room: int) -> LaidTensor:
        """As it was sent, of a memory of `room` bytes.

        Raises:
            ArgumentError: it is none, or lies outside that memory.
        """
        try:
            dtype, shape = DTYPES[said["dtype"]], tuple(map(int, said["shape"]))
            piece = cls(int(said["layer"]), said["kind"], int(said["place"]), dtype, shape, int(said["at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError("pieces", "layer, kind, place, dtype, shape and at of each", repr(said)) from error
        inside = piece.at >= 0 and min(shape, default=0) >= 0 and piece.at + piece.size <= room
        if piece.kind not in KINDS or not inside or piece.at % ALIGN:
            raise ArgumentError("pieces", f"a piece within {room} bytes, out of {KINDS}", repr(said))
        return piece


def planned(tensors: Iterable[tuple[int, str, int, Tensor]]) -> tuple[list[LaidTensor], int]:
    """Where each of the tensors (layer, kind, place, tensor) is to lie, and the bytes of all."""
    pieces, at = [], 0
    for layer, kind, place, x in tensors:
        if x.dtype not in DTYPES.values():
            raise ArgumentError("dtype", f"states in one out of {', '.join(DTYPES)}", str(x.dtype))
        pieces.append(LaidTensor(layer, kind, place, x.dtype, tuple(x.shape), at))
        at += -(-pieces[-1].size // ALIGN) * ALIGN
    return pieces, at


def runs(tokens: Tensor) -> list[list[int]]:
    """Ascending places ``[n]`` as pairs (from, to)."""
    if not len(tokens):
        return []
    cuts = (tokens.diff() != 1).nonzero().flatten() + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in tokens.tensor_split(cuts.tolist())]


def places(said: Sequence[Sequence[int]]) -> Tensor:
    """The places that `runs` wrote down, int64 ``[n]``."""
    runs = [torch.arange(a, b, device="cpu") for a, b in said]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device="cpu")
