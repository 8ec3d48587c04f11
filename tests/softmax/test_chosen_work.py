"""What chosen keys take of a rank that has T_local of T tokens: memory that is linear in both, and even work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ring_la
from ring_la.indexers import chosen, lightning, lightning_index, lightning_loss, loss
from ring_la.nn import DeepSeekSparseAttention
from ring_la.softmax.backends import chosen as kernels
from tests.support.pool import group

H, HK, K, HI, D, S = 4, 2, 4, 2, 4, 8


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that anything makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.itemsize)
        return out


def largest(f: Callable[[], object]) -> int:
    with Largest() as mode:
        f()
    return mode.numbers


def used(cp: ring_la.ContextParallel, T: int) -> dict[str, int]:
    """The largest tensor of each part of a layer, of T tokens in all."""
    layout, rng = cp.layout(T, "zigzag"), torch.Generator().manual_seed(0)
    n = layout.local_length
    q, k, v, iq, ik = (torch.randn(1, n, *s, generator=rng) for s in ((H, K), (HK, K), (HK, K), (HI, D), (D,)))
    w, leaves = torch.rand(1, n, HI, generator=rng), [x.requires_grad_() for x in (q, k, v)]
    index, kept = [x.requires_grad_() for x in (iq, ik, w)], {}
    how = dict(layout=layout, strategy="all_gather")

    def choose() -> None:
        kept["chosen"] = lightning_index(*index, S, layout=layout).places

    def forward() -> None:
        kept["o"] = ring_la.sparse_attention(*leaves, kept["chosen"], **how).o

    def loss() -> None:
        out = lightning_loss(*index, kept["chosen"], q, k, layout=layout)
        torch.autograd.grad(out, index)

    layer = DeepSeekSparseAttention(16, H, kv_rank=4, topk=S, index_heads=HI, index_dim=D)
    x = torch.randn(1, n, 16, generator=rng)

    def step() -> None:
        out = layer(x, layout=layout, output_loss=True)
        (out.o.sum() + out.loss).backward()

    parts = dict(choose=choose, forward=forward, backward=lambda: torch.autograd.grad(kept["o"].sum(), leaves))
    return {name: largest(part) for name, part in (*parts.items(), ("loss", loss), ("step of a layer", step))}


@contextmanager
def few_at_once(**more: object) -> Iterator[None]:
    """Budgets far below T_local · T; `more` of `lightning`."""
    budgets = ((chosen, "SCORES", 1 << 13), (chosen, "CHUNK", 1 << 9), (kernels, "NUMBERS", 1 << 12))
    changes = [*budgets, (loss, "NUMBERS", 1 << 12), *((lightning, *x) for x in more.items())]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def check_memory(rank: int) -> list[dict[str, int]]:
    cp = ring_la.ContextParallel(group(), scan="ring")
    with few_at_once():
        return [used(cp, T) for T in (512, 1024)]


def test_nothing_is_tokens_by_tokens(ranks):
    for short, long in ranks.run(2, check_memory):
        for part, numbers in long.items():
            assert numbers <= 2.2 * max(short[part], 1 << 12), (part, short, long)
            assert numbers < 512 * 1024 / 16, (part, long)


def check_work(rank: int) -> dict[str, int]:
    """Scores of the index that this rank forms under each layout."""
    cp, out = ring_la.ContextParallel(group(4), scan="ring"), {}
    for kind in ("contiguous", "zigzag"):
        layout, formed = cp.layout(4096, kind), []

        def counted(q, k, *rest, formed=formed, real=lightning.index_scores):
            formed.append(q.shape[1] * k.shape[1])
            return real(q, k, *rest)

        n = layout.local_length
        with few_at_once(index_scores=counted):
            lightning_index(torch.rand(1, n, HI, D), torch.rand(1, n, D), torch.rand(1, n, HI), S, layout=layout)
        out[kind] = sum(formed)
    return out


def test_zigzag_makes_the_ranks_work_even(ranks):
    found = ranks.run(4, check_work)
    share = {kind: [4 * one[kind] / sum(r[kind] for r in found) for one in found] for kind in found[0]}
    assert max(share["contiguous"]) > 1.6
    assert max(share["zigzag"]) < 1.03, share
