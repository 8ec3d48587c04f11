"""What the ranks compare before anything is sent, and which decays the host knows without asking a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm import Entry
from ..context import ShardedLayout
from ..errors import Facts
from ..kernels import Inputs
from .definition import CommonOptions, Recurrence

Flags = tuple[tuple[str, object], ...]
"""A call's own arguments that are no tensors, by name."""


def agree(
    name: str, r: Recurrence, options: CommonOptions, flags: Flags
) -> tuple[tuple[float, ...] | None, Entry | None]:
    """Let the ranks of a layout agree on a checked call; returns its decays where the host knows them, and what
    `layout.again` takes."""
    layout = options.layout
    assert layout is not None
    decays, entry = known(r.decays, layout), None
    if layout.cp.validate != "never":
        entry = layout.agree(name, signature(r, options, flags, decays), None)
    return decays, entry


def known(decays: Callable[[], tuple[float, ...]] | Tensor | None, layout: ShardedLayout) -> tuple[float, ...] | None:
    """Static decays as the host knows them: a tensor's are read once and kept with the layout; None for those that
    are learned, and change with every step."""
    if not isinstance(decays, Tensor):
        return decays if decays is None else decays()
    if decays.requires_grad or decays.is_inference():  # nobody tells when these change
        return None
    read: Any = layout.kept(WeakTensorKeyDictionary, WeakTensorKeyDictionary)
    version, values = read.get(decays, (None, None))
    if version != decays._version:
        values = tuple(decays.tolist())
        read[decays] = decays._version, values
    return values


def signature(
    r: Recurrence, options: CommonOptions, flags: Flags, decays: tuple[float, ...] | None
) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name: shapes but T, dtypes, flags and who needs a gradient."""
    state = options.initial_state
    return (
        ("rule", str(r.rule)),
        ("causal", r.causal),
        *[(r.name(f), Facts.of(x, 1)) for f, x in zip(Inputs._fields, r.inputs) if x is not None],
        ("normalizer", None if r.normalizer is None else tuple([Facts.of(x, 1) for x in r.normalizer[:2]])),
        ("initial_state", None if state is None else Facts.of(state)),
        *[(n, getattr(options, n)) for n in ("scale", "use_qk_l2norm", "output_final_state", "mode", "backend")],
        ("gradients", torch.is_grad_enabled()),
        ("decays", decays),
        *flags,
    )
