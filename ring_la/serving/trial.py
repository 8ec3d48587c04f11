"""Which batch a model is decoded in: one whose step is a graph where that was asked for, and where it is seen to go."""

from __future__ import annotations

import logging

import torch

from ..context import ContextParallel
from ..models import HybridLM
from .batch import Batch, Row
from .model import FATAL, Served, keys_stay
from .pretrained import same_logits
from .static import StaticBatch

LOG = logging.getLogger(__name__)
LENGTHS = (7, 2)
"""Tokens a rank reads of the trial's two sequences, the second on one rank's behalf."""
STEPS = 6
"""Steps of the trial: as many as a graph takes to be captured, and one that replays it."""


def batch_for(model: Served, cp: ContextParallel | None, most: int) -> Batch:
    """What a model's sequences are decoded in. Collective.

    Args:
        most: sequences, at most, where a step is to be one CUDA graph; 0: it is not. Of models that are no `HybridLM`
            it is tried first, against plain steps, and if it fails the log says why and steps are plain.

    Raises:
        UnsupportedError: a `HybridLM` that cannot do it.
    """
    if not most:
        return Batch(model)
    together = keys_stay(model.shares_keys, cp) or model.shares_weights
    ranks = cp if together else None
    if isinstance(model.model, HybridLM):
        return StaticBatch(model, ranks, most)
    why, static = "", None
    try:
        static = StaticBatch(model, ranks, len(LENGTHS))
        _try(model, cp, static)
    except FATAL:
        raise
    except Exception as error:  # a model of somebody else's may fail in its own way
        why = f"{type(error).__name__}: {error}"
    finally:
        if static is not None:
            static.close()
    if ranks is not None and ranks.comm.all_reduce(torch.tensor([float(bool(why))], device=model.device)).wait():
        why = why or "another rank could not"
    if why:
        LOG.warning("a step of %s is not captured: %s", type(model.model).__name__, why)
        return Batch(model)
    return StaticBatch(model, ranks, most)


def _try(model: Served, cp: ContextParallel | None, static: StaticBatch) -> None:
    """Two sequences side by side at fixed addresses against plain steps."""
    plain, ranks = Batch(model), 1 if cp is None else cp.size
    places = (model.max_tokens or 2**62) - STEPS - 1
    for length in (LENGTHS[0] * ranks, LENGTHS[1]):
        ids = torch.arange(1, max(1, min(length, places)) + 1, device=model.device)[None] * 7 % model.vocab_size
        for batch in (plain, static):
            batch.add(Row(), model.read(ids, None, cp))
    for _ in range(STEPS):
        tokens = plain.logits.argmax(-1).tolist()
        for batch in (plain, static):
            batch.step(tokens)
        same_logits(static.logits, plain.logits)
