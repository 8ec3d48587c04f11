"""Attention on split sequences against the dense fp64 reference: outputs, lse and every gradient on every rank."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.softmax import attention
from tests.distributed.pool import group
from tests.softmax.cases import DOCUMENTS, FEATURES, draw, error, finite, truth

STRATEGIES = ("ring",)
KINDS = ("contiguous", "zigzag", "striped")


def compare(layout, case, want, strategy: str, dtype=torch.float64, **keywords) -> dict[str, float]:
    """Relative errors of one call under a layout, of this rank's part of everything."""
    split = {"q", "k", "v"}
    local = {n: (layout.shard(t) if n in split else t) for n, t in case.tensors.items()}
    local = {n: t.to(dtype).detach().clone().requires_grad_() for n, t in local.items()}
    out = attention(**local, **case.keywords, layout=layout, strategy=strategy, **keywords)
    loss = (out.o * layout.shard(case.do)).sum() + (finite(out.lse) * layout.shard(case.dlse, dim=2)).sum()
    grads = {f"d{n}": g for n, g in zip(local, torch.autograd.grad(loss, list(local.values())))}
    got = {"o": out.o, "lse": out.lse} | {
        n: g if n[1:] in split else layout.cp.comm.all_reduce(g).wait() for n, g in grads.items()
    }
    parts = {
        n: layout.shard(t, dim=2 if n == "lse" else 1) for n, t in want.items() if n in ("o", "lse", "dq", "dk", "dv")
    }
    assert all(g.dtype == local[n[1:]].dtype for n, g in grads.items())
    return {n: error(g, parts.get(n, want.get(n))) for n, g in got.items()}


def check(rank: int, P: int, strategy: str, documents: str, features: tuple[str, ...], heads=None) -> list[str]:
    cp = ring_la.ContextParallel(group(P), validate="first", scan="ring")
    T, cu = DOCUMENTS[documents]
    bad = []
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=cu)
        for feature in features:
            errors = compare(
                layout, draw(documents, feature, None, heads), truth(documents, feature, None, heads), strategy
            )
            bad += [f"{kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_is_whole(ranks, strategy, documents, P):
    bad = ranks.run(P, check, P, strategy, documents, tuple(FEATURES))
    assert not any(bad), bad
