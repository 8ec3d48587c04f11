"""Attention whose keys are sent before its queries are there, for a caller that computes something else meanwhile.

    posted = KeysAhead(k, v, like=k, layout=layout)     keys and values start for all ranks
    …                                                   what does not need them: queries, a layer beside attention
    o = posted.attend(q)                                one kernel call over all keys

Every query sees every key, without gradients. Collective; nothing else of the same group's attention may run between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..context import ShardedLayout
from .door import split_plan
from .options import AttentionOptions
from .plan import AttentionMoves
from .tensors import Tensors


class KeysAhead:
    """Keys and values on their way.

    Args:
        k, v: this rank's, ``[B, Tk, H, K]`` and ``[B, Tk, H, V]``.
        like: a tensor of the shape and dtype of the queries to come.
        layout: of the queries; kv_layout: of the keys, None: the same.
        first: the first of calls one after the other that a CUDA graph may repeat: all ranks' streams meet.
        options: scale, backend and kv_comm_dtype of `ring_la.attention`.

    Raises:
        as `ring_la.attention`.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        like: Tensor,
        layout: ShardedLayout,
        kv_layout: ShardedLayout | None = None,
        *,
        first: bool = True,
        **options: Any,
    ) -> None:
        asked = AttentionOptions(causal=False, kv_layout=kv_layout, strategy="all_gather", **options)
        with torch.no_grad():
            plan, x = split_plan(Tensors(like, k, v), asked, layout)
            assert isinstance(plan, AttentionMoves)  # keys are gathered: no heads travel
            self._plan, self._width = plan, x.value_width
            self._posted = plan.post(x, first)

    def attend(self, q: Tensor) -> Tensor:
        """o ``[B, T, H, V]`` of this rank's queries ``[B, T, H, K]``."""
        with torch.no_grad():
            return self._plan.attend(self._posted, q, self._width)
