"""From the arguments of a model's call to this rank's tokens, their layout and their labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...context import ShardedLayout
from ...errors import ArgumentError, UnsupportedError
from ...layout import check_cu_seqlens
from .call import Call

TOKENS = ("input_ids", "inputs_embeds")
PASSED = {"output_hidden_states", "output_router_logits", "use_cache", "past_key_values", "logits_to_keep"}
"""Keywords the model gets as they are."""
READ = {
    *TOKENS,
    *("position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch", "ignore_index"),
    *("cu_seqlens", "layout", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("cache_position", "return_dict", "output_attentions"),
}
"""Keywords read here."""


def read(layouts, arguments: dict[str, object]) -> tuple[Call, dict[str, object]]:
    """The call and what the model gets in it.

    Args:
        layouts: ``(seq_len, cu_seqlens or None) → ShardedLayout`` for a batch that is whole on every rank.
        arguments: of the model's call, by name; see `parallelize`.

    Raises:
        ArgumentError, UnsupportedError: naming the argument.
    """
    given = {n: x for n, x in arguments.items() if x is not None and x is not False}
    _check_names(given)
    name, tokens = _tokens(given)
    layout = given.get("layout")
    local = {n: x for n, x in arguments.items() if n in PASSED}
    if layout is not None:
        return _split_already(layout, name, tokens, given, local)
    rows = tokens.shape[1]
    _check_padding(given.get("attention_mask"), given.get("labels"), given.get("shift_labels"), tokens)
    positions = given.get("position_ids")
    offsets = _documents(given, rows, tokens.shape[0], positions)
    labels = _whole_targets(given, rows, offsets)
    if offsets is not None and tokens.shape[0] > 1:  # one row of documents
        tokens = tokens.flatten(0, 1)[None]
        positions = None if positions is None else positions.expand(len(given[name]), -1).reshape(1, -1)
        labels = None if labels is None else labels.reshape(1, -1)
    layout = layouts(tokens.shape[1], offsets)
    positions = layout.positions[None] if positions is None else layout.shard(positions, dim=-1)
    call = Call(layout, ignore_index=given.get("ignore_index", -100))
    if labels is not None:
        call.targets = layout.shard(labels)
        call.divisor = given.get("num_items_in_batch", (labels != call.ignore_index).sum())
        local["labels"] = call.targets
    return call, local | {name: layout.shard(tokens), "position_ids": positions}


def _split_already(
    layout: object, name: str, tokens: Tensor, given: dict, local: dict[str, object]
) -> tuple[Call, dict[str, object]]:
    """The call for tokens that are this rank's already."""
    if not isinstance(layout, ShardedLayout):
        raise ArgumentError("layout", "a layout made by ContextParallel.layout", type(layout).__name__)
    if tokens.shape[1] != layout.local_length:
        raise ArgumentError(name, f"this rank's {layout.local_length} tokens with layout=", list(tokens.shape))
    for other in ("attention_mask", "cu_seqlens", "cu_seq_lens_q"):
        if other in given and not (other == "attention_mask" and bool(given[other].all())):
            raise ArgumentError(other, "None with layout=", "a tensor", "Documents are given to ContextParallel.layout")
    positions = given.get("position_ids", layout.positions[None])
    call = Call(layout, ignore_index=given.get("ignore_index", -100))
    labels = given.get("shift_labels")
    if labels is None and "labels" in given:
        labels = layout.targets(given["labels"], call.ignore_index)
    if labels is not None:
        call.targets = labels
        count = (labels != call.ignore_index).sum()
        call.divisor = given.get("num_items_in_batch")
        if call.divisor is None:
            call.divisor = layout.cp.comm.all_reduce(count).wait()
        local["labels"] = labels
    return call, local | {name: tokens, "position_ids": positions}


def _check_names(given: dict[str, object]) -> None:
    for name in given:
        if name not in READ | PASSED:
            raise UnsupportedError(name, "no such keyword on a split sequence", "a value")
    if "output_attentions" in given:
        raise UnsupportedError("output_attentions", "False", "True", "The weights never exist whole")


def _tokens(given: dict[str, object]) -> tuple[str, Tensor]:
    names = [n for n in TOKENS if n in given]
    if len(names) != 1:
        raise ArgumentError("input_ids", "input_ids or inputs_embeds", " and ".join(names) or "neither")
    tokens = given[names[0]]
    if not isinstance(tokens, Tensor) or tokens.dim() != (2 if names[0] == "input_ids" else 3):
        raise ArgumentError(names[0], "[B, T] ids or [B, T, D] embeddings", getattr(tokens, "shape", tokens))
    return names[0], tokens


def _check_padding(mask: object, labels: Tensor | None, shift_labels: Tensor | None, tokens: Tensor) -> None:
    """Accept a mask of ones, or padding after each row's last token whose labels are ignored."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError("attention_mask", f"[B, T] = {list(tokens.shape[:2])}", got)
    real = mask.bool()
    if bool(real.all()):
        return
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise UnsupportedError("attention_mask", "padding on the right", "zeros before ones", "Or pack documents")
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None and bool((given[~real] >= 0).any()):
            raise UnsupportedError(name, "ignored labels on padding", "others")


def _documents(given: dict, length: int, batch: int, positions: Tensor | None) -> tuple[int, ...] | None:
    """Offsets of packed documents over all rows of the batch, one after the other; None where there is one a row."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if name in given:
            other = given.get("cu_seq_lens_k")
            if name == "cu_seq_lens_q" and other is not None and not torch.equal(given[name].cpu(), other.cpu()):
                raise UnsupportedError("cu_seq_lens_k", "cu_seq_lens_q", "other offsets")
            return check_cu_seqlens(given[name], batch * length, name)
    if positions is None:
        if "seq_idx" in given:
            raise ArgumentError("seq_idx", "None without cu_seq_lens_q or position_ids", "a tensor")
        return None
    if not isinstance(positions, Tensor) or positions.shape[-1] != length:
        raise ArgumentError("position_ids", f"{length} positions along the last dimension", positions)
    if positions.dim() != 2:
        expected = "[B, T], or cu_seqlens with positions of several axes"
        raise UnsupportedError("position_ids", expected, list(positions.shape))
    starts = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=True).expand(batch, -1)
    if int(starts.sum()) == batch:
        return None
    return (*starts.flatten().nonzero().flatten().tolist(), batch * length)


def _whole_targets(given: dict, length: int, offsets: Sequence[int] | None) -> Tensor | None:
    """The label every token of the whole batch should predict ``[B, T]``: its successor's in its document."""
    if "shift_labels" in given:
        return given["shift_labels"]
    labels = given.get("labels")
    if labels is None:
        return None
    ignore = given.get("ignore_index", -100)
    shifted = F.pad(labels[:, 1:], (0, 1), value=ignore)
    if offsets is not None:
        last = torch.tensor(offsets[1:], device=labels.device) - 1
        shifted = shifted.flatten().index_fill(0, last[last >= 0], ignore).view_as(shifted)
    return shifted
