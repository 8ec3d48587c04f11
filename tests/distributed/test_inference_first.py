"""Calls in inference mode before calls that are trained: what is kept for both is of use to both."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.recurrences import RECURRENCES
from ring_la.testing.examples import make_arguments
from tests.support.file_memory import over_files
from tests.support.pool import group

CU = (0, 3, 9, 26)


def calls() -> dict:
    """Whole inputs, and the function that takes a rank's part of them with the layout (or offsets) given."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 26, 2, 4, generator=rng) for _ in range(3))
    g = -torch.rand(1, 26, 2, generator=rng)
    weight = torch.randn(8, 3, generator=rng)
    found = {
        "attention": ((q, k, v), lambda q, k, v, **w: ring_la.attention(q, k, v, causal=True, **w).o),
        "forgetting_attention": ((q, k, v, g), lambda *x, **w: ring_la.forgetting_attention(*x, **w).o),
        "short_conv": ((v.flatten(2),), lambda x, **w: ring_la.short_conv(x, weight, **w).o),
        "token_shift": ((v,), lambda x, **w: ring_la.token_shift(x, **w).o),
        "bidirectional": ((q, k, v), lambda *x, **w: ring_la.linear_attention(*x, causal=False, **w).o),
    }
    for r in RECURRENCES:
        given = make_arguments(r, 1, 26, dtype=torch.float32)
        names = [n for n, a in r.arguments.items() if not a.shared]
        rest = {n: x for n, x in given.items() if n not in names}

        def call(*x, of=r.name, names=names, rest=rest, **where):
            return getattr(ring_la, of)(**dict(zip(names, x)), **rest, **where).o

        found[r.name] = tuple(given[n].detach() for n in names), call
    return found


def check(rank: int, P: int, kind: str, deterministic: bool) -> None:
    for name, (whole, call) in calls().items():
        cp = ring_la.ContextParallel(group(P), deterministic=deterministic, scan="ring")
        results = []
        for first in (False, True):
            layout = cp.layout(26, kind, CU)
            try:
                with torch.inference_mode(first), torch.no_grad():
                    call(*(layout.shard(x) for x in whole), layout=layout)
            except ring_la.UnsupportedError:
                break
            leaves = [layout.shard(x).requires_grad_() for x in whole]
            out = call(*leaves, layout=layout)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results)) if results else True, name


@pytest.mark.parametrize(("kind", "deterministic"), [("zigzag", False), ("contiguous", True)])
def test_a_layout_that_inference_used_is_trained_with(ranks, kind, deterministic):
    ranks.run(2, check, 2, kind, deterministic)


def check_indices(rank: int) -> None:
    cp = ring_la.ContextParallel(group(2), scan="ring")
    layout, other = cp.layout(26, "zigzag", CU), cp.layout(26, "contiguous", CU)
    with torch.inference_mode():
        kept = [layout.positions, layout.documents, layout.local_tokens, layout.cu_pieces, layout.order]
        x = torch.zeros(1, layout.local_length, 2)
        layout.gather(x), layout.convert(x, other), layout.targets(x[..., 0].long())
    assert not any(t.is_inference() for t in kept)
    x = torch.zeros(1, layout.local_length, 2, requires_grad=True)
    (layout.gather(x).sum() + layout.convert(x, other).sum()).backward()
    layout.targets(x[..., 0].long())


def test_a_layout_s_indices_are_no_inference_tensors(ranks):
    ranks.run(2, check_indices)


@pytest.mark.parametrize("packed", [False, True])
def test_calls_on_one_device_are_trained_after_inference(packed):
    where = {"cu_seqlens": torch.tensor(CU)} if packed else {}
    for name, (whole, call) in calls().items():
        with torch.inference_mode():
            before = call(*whole, **where)
        leaves = [x.clone().requires_grad_() for x in whole]
        out = call(*leaves, **where)
        out.sum().backward()
        torch.testing.assert_close(before.clone(), out.detach(), msg=lambda m, name=name: f"{name}: {m}")


def check_memory(rank: int, folder: str) -> None:
    """Memory that ranks of one host share is made by the first call that needs it."""
    cp, patch = over_files(2, folder)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    with patch:
        for strategy in ("ring", "ulysses"):
            cp.comm.memory.current = None
            layout = cp.layout(40)
            shards = [layout.shard(x) for x in (q, k, v)]
            with torch.inference_mode():
                ring_la.attention(*shards, causal=True, layout=layout, strategy=strategy)
            leaves = [x.requires_grad_() for x in shards]
            ring_la.attention(*leaves, causal=True, layout=layout, strategy=strategy).o.sum().backward()


def test_memory_that_inference_made_is_trained_with(ranks, tmp_path):
    ranks.run(2, check_memory, str(tmp_path))
