"""A border at which states have arrived."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ring_la.comm.copy_kernel import FLAG
from ring_la.comm.symmetric import Lanes
from ring_la.kernels.protocol import Border, SpanMaps
from ring_la.scan.mailbox_ring import DenseMaps, Hop, LinkStates, launch_dense


def silent(device: torch.device) -> Any:
    """A group of which a link's launch reads no more than sizes."""
    none = torch.zeros(1, dtype=torch.int32, device=device)
    boxes = SimpleNamespace(
        own=none, mailboxes=none.long(), broken=none, report=none, lanes=(Lanes(512, 1024, 0), Lanes(128, 4096, 0)),
        patience=0, constants=dict(P=1, FLAG=FLAG, CLOCK=device.type == "cuda"),
    )  # fmt: skip
    return SimpleNamespace(mailboxes=boxes, rank=0)


class Arrived(Border):
    """States enter the only piece, or the last (gradients of states, back), and others leave for other ranks, of dense
    maps (see `protocol.Border`).

    Args:
        came, came_back: what enters on the ways forward and back ``[1, 1, H, K, V]``.
    """

    def __init__(self, came: Tensor, came_back: Tensor) -> None:
        self.key, self.memory, self.beside = "arrived", (), None
        self.whole, self.sends, self.carries = (True, True), (True, True), (True, True)
        self._came, self._group = (came, came_back), silent(came.device)

    def spans(
        self, maps: SpanMaps, S0: Tensor | None, entering: Tensor, leaving: Tensor, first: Tensor | None,
        reverse: bool, beside: bool, through: Tensor | None = None, final: bool = False,
    ) -> None:  # fmt: skip
        states = LinkStates(self._came[reverse].contiguous(), entering, leaving)
        dense = DenseMaps(maps.transition, maps.own, maps.zero, first)
        launch_dense(self._group, dense, states, Hop(None, None, True, earlier=0), reverse=reverse)
