"""From the arguments of a model's call to this rank's tokens, their layout and their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...checks import check_tokens, check_total
from ...context import ShardedLayout
from ...errors import ArgumentError, UnsupportedError
from ...layout import check_cu_seqlens
from .call import ModelCall, Targets
from .loss import fingerprint
from .names import NAMES

TOKENS = ("input_ids", "inputs_embeds")
PASSED = {"output_hidden_states", "output_router_logits"}
"""Keywords the model gets as they are."""
READ = {
    *TOKENS,
    *("position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch", "ignore_index"),
    *("cu_seqlens", "layout", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("cache_position", "return_dict", "output_attentions", "use_cache", *NAMES),
    "logits_to_keep",
}
"""Keywords read here."""


class Words(NamedTuple):
    """How many tokens a model has embeddings and logits for; None: it does not say."""

    embedded: int | None
    told: int | None

    @classmethod
    def of(cls, model: Any) -> Words:
        head = model.get_output_embeddings()
        return cls(getattr(model.get_input_embeddings(), "num_embeddings", None), getattr(head, "out_features", None))


def read(layouts: Callable, arguments: dict[str, Any], words: Words) -> tuple[ModelCall, dict[str, Any]]:
    """The call and what the model gets in it.

    Args:
        layouts: ``(seq_len, cu_seqlens or None) → ShardedLayout`` for a batch that is whole on every rank.
        arguments: of the model's call, by name; see `parallelize`.
        words: of the model. Ids and labels are held against them on a CPU, where nobody has to wait for that.

    Raises:
        ArgumentError, UnsupportedError: naming the argument.
    """
    given = {n: x for n, x in arguments.items() if x is not None and x is not False}
    _check_names(given)
    name, tokens = _tokens(given)
    if name == "input_ids" and tokens.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, "int64 or int32 ids", str(tokens.dtype))
    layout, ignored = given.get("layout"), given.get("ignore_index", -100)
    if name == "input_ids" and words.embedded is not None:
        check_tokens(name, tokens, words.embedded, layout)
    for label in ("labels", "shift_labels"):
        x = given.get(label)
        if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and words.told is not None:
            check_tokens(label, x, words.told, layout, ignored)
    read_batch = _part if "layout" in given else _whole
    call, local = read_batch(layouts, name, tokens, given)
    call.keep = _kept(given, call.layout.seq_len)
    if call.targets is not None:
        local["labels"] = call.targets.labels
    return call, local | {n: x for n, x in arguments.items() if n in PASSED}


def _whole(layouts: Callable, name: str, tokens: Tensor, given: dict) -> tuple[ModelCall, dict[str, Tensor]]:
    """The call for a batch that is whole on every rank."""
    batch, length = tokens.shape[:2]
    _check_labels(given, (batch, length))
    padded = _check_padding(given.get("attention_mask"), given.get("labels"), given.get("shift_labels"), tokens)
    positions = given.get("position_ids")
    offsets = _documents(given, length, batch, positions)
    _check_documents(given, offsets, length)
    labels = _whole_targets(given, offsets)
    if offsets is not None and batch > 1:  # one row of documents
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], batch, -1).flatten(-2)[..., None, :]
        tokens = tokens.flatten(0, 1)[None]
        labels = None if labels is None else labels.reshape(1, -1)
    layout = layouts(tokens.shape[1], offsets)
    call = ModelCall(layout, padded=padded)
    if positions is None:
        call.last_position = max(b - a for a, b in zip(layout.cu_seqlens, layout.cu_seqlens[1:])) - 1
        positions = layout.positions[None]
    else:
        call.last_position = positions.max()
        positions = layout.shard(positions, dim=-1)
    call.fingerprint = fingerprint(given.get("input_ids"), labels)
    if labels is not None:
        ignore = given.get("ignore_index", -100)
        divisor = given.get("num_items_in_batch", (labels != ignore).sum())
        call.targets = Targets(layout.shard(labels), divisor, ignore)
    return call, {name: layout.shard(tokens), "position_ids": positions}


def _part(layouts: Callable, name: str, tokens: Tensor, given: dict) -> tuple[ModelCall, dict[str, Tensor]]:
    """The call for tokens that are this rank's already."""
    layout = given["layout"]
    if not isinstance(layout, ShardedLayout):
        raise ArgumentError("layout", "a layout made by ContextParallel.layout", type(layout).__name__)
    if tokens.shape[1] != layout.local_length:
        if tokens.shape[1] == layout.seq_len:
            layout.require_local(name, layout.seq_len)
        raise ArgumentError(name, f"this rank's {layout.local_length} tokens with layout=", list(tokens.shape))
    for other in ("attention_mask", "cu_seqlens", "cu_seq_lens_q", "seq_idx", "cache_position"):
        if other in given and not (other == "attention_mask" and bool(given[other].all())):
            raise ArgumentError(other, "None with layout=", "a tensor", "Documents are given to ContextParallel.layout")
    _check_labels(given, tuple(tokens.shape[:2]))  # type: ignore[arg-type]
    comm = layout.cp.comm
    call = ModelCall(layout)
    positions = given.get("position_ids")
    if positions is None:
        positions = layout.positions[None]
        call.last_position = max(b - a for a, b in zip(layout.cu_seqlens, layout.cu_seqlens[1:])) - 1
    else:
        call.last_position = comm.all_reduce(positions.max(), dist.ReduceOp.MAX).wait()
    labels, ignore = given.get("shift_labels"), given.get("ignore_index", -100)
    if labels is None and "labels" in given:
        labels = layout.targets(given["labels"], ignore)
    if labels is not None:
        divisor = given.get("num_items_in_batch")
        if divisor is None:
            divisor = comm.all_reduce((labels != ignore).sum()).wait()
        call.targets = Targets(labels, divisor, ignore)
    return call, {name: tokens, "position_ids": positions}


def _kept(given: dict, length: int) -> Tensor | None:
    """The tokens logits_to_keep means."""
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, int) and keep == 0:
        return None
    if torch.is_grad_enabled() or "labels" in given or "shift_labels" in given:
        raise UnsupportedError("logits_to_keep", "0 with gradients or labels", keep)
    every = torch.arange(length, device="cpu")
    return every[max(0, length - keep) :] if isinstance(keep, int) else every[keep.cpu()]


def _check_names(given: dict[str, Any]) -> None:
    for name in given:
        if name not in READ | PASSED:
            raise UnsupportedError(name, "no such keyword on a split sequence", "a value")
    if "output_attentions" in given:
        raise UnsupportedError("output_attentions", "False", "True", "The weights never exist whole")


def _check_labels(given: dict[str, Any], shape: tuple[int, int]) -> None:
    """Labels are one a token, and what their loss is divided by is a number."""
    for name in ("labels", "shift_labels"):
        x = given.get(name)
        if x is not None and (not isinstance(x, Tensor) or x.shape != shape):
            raise ArgumentError(name, f"[B, T] = {list(shape)}, one label a token", _shape(x))
        if x is not None and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            raise ArgumentError(name, "an int tensor", str(x.dtype))
    check_total(given.get("num_items_in_batch"), "num_items_in_batch")


def _tokens(given: dict[str, Any]) -> tuple[str, Tensor]:
    names = [n for n in TOKENS if n in given]
    if len(names) != 1:
        raise ArgumentError("input_ids", "input_ids or inputs_embeds", " and ".join(names) or "neither")
    tokens = given[names[0]]
    if not isinstance(tokens, Tensor) or tokens.dim() != (2 if names[0] == "input_ids" else 3):
        raise ArgumentError(names[0], "[B, T] ids or [B, T, D] embeddings", _shape(tokens))
    return names[0], tokens


def _shape(x: object) -> list[int] | str:
    """What an argument is, in an error."""
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__


def _check_padding(mask: object, labels: Tensor | None, shift_labels: Tensor | None, tokens: Tensor) -> bool:
    """Accept a mask of ones, or padding after each row's last token whose labels are ignored; is there padding?"""
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        raise UnsupportedError("attention_mask", f"[B, T] = {list(tokens.shape[:2])}", _shape(mask))
    real = mask.bool()
    if bool(real.all()):
        return False
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise UnsupportedError("attention_mask", "padding on the right", "zeros before ones", "Or pack documents")
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None and bool((given[~real] >= 0).any()):
            raise UnsupportedError(name, "ignored labels on padding", "others")
    return True


def _documents(given: dict, length: int, batch: int, positions: Tensor | None) -> tuple[int, ...] | None:
    """Offsets of packed documents over all rows of the batch, one after the other; None where there is one a row."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if name in given:
            other = given.get("cu_seq_lens_k")
            if name == "cu_seq_lens_q" and other is not None and not torch.equal(given[name].cpu(), other.cpu()):
                raise UnsupportedError("cu_seq_lens_k", "cu_seq_lens_q", "other offsets")
            offsets = check_cu_seqlens(given[name], batch * length, name)
            if not set(range(0, batch * length, length)) <= set(offsets):
                raise ArgumentError(name, f"offsets over all rows, a document in one row of {length}", list(offsets))
            return offsets
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.shape[-1] != length:
        raise ArgumentError("position_ids", f"{length} positions along the last dimension", _shape(positions))
    if positions.dim() != 2:
        expected = "[B, T], or cu_seqlens with positions of several axes"
        raise UnsupportedError("position_ids", expected, list(positions.shape))
    if positions.shape[0] not in (1, batch):
        raise ArgumentError("position_ids", f"[{batch}, {length}] or [1, {length}]", list(positions.shape))
    starts = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=True).expand(batch, -1)
    if int(starts.sum()) == batch:
        return None
    return (*starts.flatten().nonzero().flatten().tolist(), batch * length)


def _check_documents(given: dict, offsets: tuple[int, ...] | None, length: int) -> None:
    """What says the same as the offsets in another way must agree with them."""
    cache_position, numbers = given.get("cache_position"), given.get("seq_idx")
    if cache_position is not None and not torch.equal(
        cache_position.cpu().flatten(), torch.arange(length, device="cpu")
    ):
        raise UnsupportedError("cache_position", "None, or positions from 0 where the cache is empty", "others")
    if numbers is not None:
        rows = F.pad(numbers.cpu().diff(dim=-1) != 0, (1, 0), value=True)
        starts = rows.flatten().nonzero().flatten().tolist()
        if rows.shape[-1] != length or starts != list(offsets or range(0, rows.numel() + 1, length))[:-1]:
            raise ArgumentError("seq_idx", "the documents of cu_seq_lens_q or position_ids", "others")


def _whole_targets(given: dict, offsets: Sequence[int] | None) -> Tensor | None:
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
