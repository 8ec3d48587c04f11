"""A `HybridLM` of which each rank has a part of the weights, to read and to decode with on all ranks.

    weights = HybridWeights(model, cp)      the large ones become shards
    weights.settle()                        all are in memory
    with weights.call(cut=False): …         the model's parts are called with a prompt, which is split
    with weights.call(cut=True): …          with tokens that all ranks have alike

Linear layers, embeddings and stacked experts are sharded as `sharded_weights` says; what layers have beside them is
whole on every rank, and so are routers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..context import ContextParallel
from ..errors import UnsupportedError
from ..grouped_gemm import grouped_gemm
from ..models import HybridLM
from ..nn import MixtureOfExperts
from ..nn.moe import GroupedLinear
from .sharded_weights import ShardedWeights


class HybridWeights:
    """The weights of a model, whose large ones become shards. Collective.

    Args:
        model: on any device; a head tied to the embedding becomes a module of its own, with the same weight.
        cp: the ranks, more than one.

    Raises:
        UnsupportedError: deterministic=True, under which blocks of tokens go by weights that are whole.
    """

    def __init__(self, model: HybridLM, cp: ContextParallel) -> None:
        if cp.deterministic:
            raise UnsupportedError("sharded", "False with deterministic=True", True)
        self._model, self._cut = model, False
        self._weights = ShardedWeights(cp, lambda: self._cut)
        if model.head is None:
            rows, channels = model.embedding.weight.shape
            model.head = nn.Linear(channels, rows, bias=False, device="meta")
            model.head.weight = model.embedding.weight
        routers = [m.router for m in model.modules() if isinstance(m, MixtureOfExperts)]
        self._weights.take_linears(model, routers)
        for module in model.modules():
            if isinstance(module, GroupedLinear):
                self._weights.take(module, ["weight"], partial(self._grouped, module))

    def settle(self) -> None:
        """All weights are in memory: from here on the model can be called."""
        self._weights.settle(self._model)

    @contextmanager
    def call(self, cut: bool) -> Iterator[None]:
        """Calls of the model, or of its parts one after the other; `cut`: of tokens that all ranks have alike."""
        self._cut = cut
        try:
            with self._weights.around():
                yield
        finally:
            self._cut = False

    def _grouped(self, module: GroupedLinear, x: Tensor, sizes: Tensor) -> Tensor:
        """Rows sorted by expert: those of this rank's experts by them, zeros of the others, and the ranks' sum."""
        part, M = self._weights.part(module, "weight"), len(x)
        here = torch.cat([sizes, sizes.new_zeros(len(part.stored))])[part.first : part.first + len(part.stored)]
        before, mine = sizes[: part.first].sum(), here.sum()
        each = torch.arange(M, device=x.device)
        order = (each + before) % M  # this rank's rows first
        padded = torch.cat([here[:-1], here[-1:] + M - mine])  # the others' go along with its last expert
        y = grouped_gemm(x[order], part.stored.mT, padded, backend=module.backend)
        y = torch.where(each[:, None] < mine, y, 0)
        comm = self._weights.comm
        with comm.streams.in_order():
            return comm.all_reduce(torch.empty_like(y).index_copy_(0, order, y)).wait()
