"""A cluster's links as a cost model of any group on it, for ``ring-la plan``.

Ranks are placed node by node, so a group of P ranks fills nodes in order. What crosses nodes goes through each GPU's
own share of the network. From a latency and a bandwidth of both kinds of link:

    hop        mean over the chain's hops, of which one in `per_node` crosses nodes
    swap       the slowest link, for all ranks wait for it
    gather     log₂ P latencies; between nodes a block arrives once and all links of a node share the work
    exchange   the part that comes from other nodes through the network, beside the rest; `PEER` a rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..scan import CostModel
from ..scan.auto import Line
from .rates import Rates

PEER = 0.5e-6
"""Seconds an all-to-all takes for each rank more: assumed, not measured."""
MAPS = Line(3e-6, 1.4e12), Line(3e-6, 30e12)
"""Elementwise map over bytes and dense map over operations, where the rates have none: estimates for an H200."""


@dataclass(frozen=True)
class Cluster:
    """GPUs and their links.

    Attributes:
        per_node: GPUs of one node.
        inside, between: one hop's latency (s) and bandwidth (bytes/s, one way, of one GPU) in a node and across nodes.
        post, launch: host time of one message and of one tensor operation (s); zero under CUDA graphs.
    """

    per_node: int
    inside: Line
    between: Line
    post: float = 30e-6
    launch: float = 20e-6

    def model(self, P: int, rates: Rates) -> CostModel:
        """The cost model of a group of P > 1 ranks: as measured if the rates have it and it is on one node."""
        if P <= self.per_node and P in rates.groups:
            return rates.groups[P] if self.launch else replace(rates.groups[P], post=0.0, launch=0.0)
        measured = next(iter(rates.groups.values()), None)
        add, matmul = (measured.add, measured.matmul) if measured else MAPS
        crossings = -(-P // self.per_node) - 1
        share = crossings / (P - 1)
        alpha = (1 - share) * self.inside.alpha + share * self.between.alpha
        beta = 1 / ((1 - share) / self.inside.beta + share / self.between.beta)
        slow = self.between if crossings else self.inside
        outside = (P - self.per_node) / (P - 1) if crossings else 0.0
        through = max(outside / self.between.beta, (1 - outside) / self.inside.beta)
        together = min(self.inside.beta, self.per_node * self.between.beta) if crossings else self.inside.beta
        return CostModel(
            hop=Line(alpha, beta),
            swap=slow,
            gather=Line(math.ceil(math.log2(P)) * slow.alpha, together),
            exchange=Line(slow.alpha + (P - 1) * PEER, 1 / through),
            add=add,
            matmul=matmul,
            post=self.post,
            launch=self.launch,
        )
