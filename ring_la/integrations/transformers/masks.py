"""Masks as descriptions.

Under the name "ring_la" the mask registry returns no tensor but a `CausalMask`, which the model hands to its attention
layers as it would a tensor. The library describes a mask as nested functions of positions; only those known here are
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from ...errors import UnsupportedError


@dataclass(frozen=True)
class CausalMask:
    """A causal mask: within `window` tokens back (the token itself counts), or within chunks of `chunk` tokens.

    `blocks`: it had an overlay of blocks, which were empty. `read`: False where torch.compile traces, which does not
    look into a function: a layer's mask is then the one it had in its last eager call.
    """

    window: int | None = None
    chunk: int | None = None
    blocks: bool = False
    read: bool = True

    def __getitem__(self, at: object) -> CausalMask:
        """What indexers ask of a mask: one row of heads, which are all alike."""
        return self

    def contiguous(self) -> CausalMask:
        """What generation asks of the masks it prepares for a cache of fixed size."""
        raise UnsupportedError("cache_implementation", "a cache that grows", "one of fixed size")


def make_mask(mask_function: Callable = masking_utils.causal_mask_function, **_: object) -> CausalMask:
    """What the mask registry calls in place of building a tensor.

    Sizes, offsets and padding are those of this rank's tokens and mean nothing here; documents are the layout's.
    """
    return UNREAD if torch.compiler.is_compiling() else CausalMask(**_read(mask_function))


UNREAD = CausalMask(read=False)


def documents_of_layout() -> AbstractContextManager[None]:
    """The library's models do not look for documents in positions meanwhile, which would wait for the device: the
    layout knows them. (A compiler's traces do not wait.)"""
    return nullcontext() if torch.compiler.is_compiling() else _not_searched()


@contextmanager
def _not_searched() -> Iterator[None]:
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_documents
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _no_documents(position_ids: torch.Tensor) -> None:
    """In the place of `find_packed_sequence_indices`."""


def mask_of(module: Any, mask: CausalMask) -> CausalMask:
    """The mask of a layer: as it was read, or as it was when that layer last ran eagerly.

    Raises:
        UnsupportedError: while torch.compile traces, a layer that has not run before, or one with chunks or blocks.
    """
    if mask.read:
        if getattr(module, "_ring_la_mask", None) != mask:
            module._ring_la_mask = mask
        return mask
    mask = getattr(module, "_ring_la_mask", None)
    if mask is None:
        hint = "parallelize(check=True) runs it, and so does a call before torch.compile's"
        raise UnsupportedError("model", "under torch.compile a model that has run eagerly once", "a new one", hint)
    if mask.chunk is not None or mask.blocks:
        raise UnsupportedError("model", "under torch.compile no attention in chunks or with blocks", mask)
    return mask


def _read(function: Callable) -> dict[str, Any]:
    """The overlays a mask function is made of."""
    if function is masking_utils.causal_mask_function:
        return {}
    name = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    inside = _closure(function)
    if name == "and_masks":
        parts: dict[str, int] = {}
        for part in inside["mask_functions"]:
            parts |= _read(part)
        return parts
    if name == "or_masks":  # blocks of image tokens see each other; there are no images on a split sequence
        parts = [part for part in inside["mask_functions"] if not _without_blocks(part)]  # type: ignore[assignment]
        return {**_read(parts[0]), "blocks": True} if len(parts) == 1 else _refuse(name)  # type: ignore[arg-type, index]
    if name == "sliding_window_overlay":
        return {"window": int(inside["sliding_window"])}
    if name == "chunked_overlay":
        return {"chunk": int(inside["chunk_size"])}
    if name == "packed_sequence_mask_function":  # read off this rank's positions; the layout knows the documents
        return {}
    if name == "remap_positions_for_packed_sequence":
        return _read(inside["mask_function"])
    return _refuse(name or str(function))


def _refuse(maker: str) -> dict[str, Any]:
    raise UnsupportedError("model", "masks that are causal, sliding or chunked", f"a mask made by {maker!r}")


def _without_blocks(function: Callable) -> bool:
    """Whether a function is the library's overlay for blocks, and no token is in one."""
    if getattr(function, "__qualname__", "").partition(".<locals>")[0] != "blockwise_overlay":
        return False
    outside = (_closure(function)["block_sequence_ids"] < 0).all()
    if outside.is_cuda:  # without waiting for the device
        torch._assert_async(outside, "ring_la: blocks of tokens that see each other on a split sequence")
        return True
    return bool(outside)


def _closure(function: Callable) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, cells)}
