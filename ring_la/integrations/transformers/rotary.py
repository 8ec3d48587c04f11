"""Rotary frequencies that depend on the longest document of a call (dynamic NTK, LongRoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def goes_by_length(module: Any) -> bool:
    """Whether a module's frequencies depend on the largest position it is given."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def rotary_forward(self: Any, x: Tensor, position_ids: Tensor, *args, **keywords) -> tuple[Tensor, ...]:
    """Cosines and sines of this rank's positions, by frequencies for the longest document of the whole batch."""
    call, own = self._ring_la.call, type(self).forward
    if call is None or call.last_position is None:
        return own(self, x, position_ids, *args, **keywords)
    last, shape = call.last_position, (*position_ids.shape[:-1], 1)
    last = last.to(position_ids).expand(shape) if isinstance(last, Tensor) else position_ids.new_full(shape, last)
    out = own(self, x, torch.cat([position_ids, last], -1), *args, **keywords)
    return tuple(t[..., :-1, :] for t in out)
