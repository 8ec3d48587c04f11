"""Checks of what a `HybridLM` is given: an `ArgumentError` names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_int, check_tokens
from ..errors import ArgumentError, describe_tensor
from .config import HybridConfig

IGNORE = -100
"""The target of a token that has none."""


def check_model(model: object) -> None:
    """Refuse what is no `HybridLM`, and stands in place of none."""
    if not isinstance(getattr(model, "config", None), HybridConfig):
        raise ArgumentError("model", "a HybridLM", describe_tensor(model))


def check_targets(targets: object, ids: Tensor, words: int, layout: object) -> None:
    """Refuse what is no label for each of `ids` out of a vocabulary of so many words."""
    if not isinstance(targets, Tensor) or targets.shape != ids.shape or targets.dtype != torch.int64:
        raise ArgumentError("targets", f"torch.int64 of the shape of ids, {list(ids.shape)}", describe_tensor(targets))
    check_tokens("targets", targets, words, layout, IGNORE)


def check_chunk(chunk: object) -> None:
    """Refuse what is no number of rows."""
    check_int("chunk", chunk, 1)
