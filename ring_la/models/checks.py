"""Checks of what a `HybridLM` is given: an `ArgumentError` names the argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..autograd import traced
from ..context import ShardedLayout
from ..errors import ArgumentError, describe_tensor

IGNORE = -100
"""The target of a token that has none."""


def check_targets(targets: object, ids: Tensor, words: int, layout: object) -> None:
    """Refuse what is no label for each of `ids` out of a vocabulary of so many words."""
    if not isinstance(targets, Tensor) or targets.shape != ids.shape or targets.dtype != torch.int64:
        raise ArgumentError("targets", f"torch.int64 of the shape of ids, {list(ids.shape)}", describe_tensor(targets))
    check_tokens("targets", targets, words, layout)


def check_tokens(name: str, tokens: Tensor, words: int, layout: object) -> None:
    """Refuse tokens that a vocabulary of so many words has not, IGNORE among targets aside. They are looked at on a
    CPU, where nobody has to wait for them, and by a layout that validates always."""
    always = isinstance(layout, ShardedLayout) and layout.cp.validate == "always"
    if traced(tokens) or not tokens.numel() or not (always or tokens.device.type == "cpu"):
        return
    if name == "targets":
        tokens = tokens.masked_fill(tokens == IGNORE, 0)
    low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= words:
        ignored = f", or {IGNORE}" if name == "targets" else ""
        raise ArgumentError(name, f"tokens of the vocabulary, 0 to {words - 1}{ignored}", f"{low} to {high}")


def check_total(total: Tensor | float | None) -> float | str | None:
    """What ranks compare of a number of targets to divide by, after refusing what is none; a GPU's is not looked at."""
    if isinstance(total, Tensor):
        if total.numel() != 1 or total.dtype == torch.bool or total.is_complex():
            raise ArgumentError("total", "one number of targets, above 0", describe_tensor(total))
        if traced(total) or total.device.type != "cpu":
            return "a tensor"
        value: object = total.item()
    else:
        value = total
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ArgumentError("total", "a number of targets, above 0", repr(value))
    return value


def check_chunk(chunk: object) -> None:
    """Refuse what is no number of rows."""
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ArgumentError("chunk", "an int ≥ 1", repr(chunk))
