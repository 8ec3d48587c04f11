"""Layers of blocks that read the step of time alone: without gradients each rank computes some of them, for all.

A block's scales, shifts and gates are linear in SiLU of the step's embedding, one row a batch row. Splitting tokens
splits nothing of that: in Flux 3.2 B of 12 B parameters would be read by every rank at every step. Here each rank
computes the layers of its share once a call, before the first block, and one gathering brings all ranks' results.
Numbers are those of one process, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...comm import Group


class StepLinear(nn.Linear):
    """A layer that gives what was computed for it in this call.

    Attributes:
        ring_la_said: ``[B, features]``; None: it computes by itself.
    """

    ring_la_said: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        said = self.ring_la_said
        return said if said is not None and said.shape[:-1] == input.shape[:-1] else super().forward(input)


class StepLayers:
    """The layers of one model that read the step alone.

    Attributes:
        layers: in the order of their blocks. shares: for each rank, the numbers of those it computes.
    """

    def __init__(self, group: Group, layers: Sequence[nn.Linear]) -> None:
        self.group, self.layers = group, [plain(layer) for layer in layers]
        self.shares = shared_out([layer.weight.numel() for layer in self.layers], group.size)
        self._said = False

    def adopt(self) -> None:
        """From now on the layers give what `compute` found."""
        for layer in self.layers:
            layer.__class__ = StepLinear

    def restore(self) -> None:
        """The way back."""
        self.forget()
        for layer in self.layers:
            layer.__class__ = nn.Linear

    def forget(self) -> None:
        """Before a call: every layer computes by itself."""
        if self._said:
            self._said = False
            for layer in self.layers:
                del layer.ring_la_said

    def compute(self, embedding: Tensor) -> None:
        """All layers' results for the step's embedding ``[B, C]``, each from the rank that has it in its share."""
        if torch.is_grad_enabled() or not all(_is_whole(layer.weight) for layer in self.layers):
            return
        x = F.silu(embedding)
        mine = [nn.Linear.forward(self.layers[n], x) for n in self.shares[self.group.rank]]
        widths = [sum(self.layers[n].out_features for n in share) for share in self.shares]
        own = torch.cat([*mine, x.new_empty(len(x), max(widths) - widths[self.group.rank])], 1)
        came = self.group.all_gather(own).wait()
        for share, rows in zip(self.shares, came):
            parts = rows[:, : sum(self.layers[n].out_features for n in share)]
            for n, part in zip(share, parts.split([self.layers[n].out_features for n in share], 1)):
                self.layers[n].ring_la_said = part
        self._said = True


def plain(layer: Any) -> nn.Linear:
    """The layer itself, under an adapter (LoRA), which goes on adding its part."""
    return getattr(layer, "base_layer", layer)


def shared_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the numbers of things that it takes, about equally much: the largest first, to who has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        shares[least].append(n)
        loads[least] += sizes[n]
    return [sorted(share) for share in shares]


def _is_whole(weight: Tensor) -> bool:
    """Whether a weight is there (FSDP keeps a part of it outside of its own blocks)."""
    return type(weight) is nn.Parameter and weight.dim() == 2
