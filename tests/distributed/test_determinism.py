"""Bits of a deterministic ContextParallel do not depend on the number of ranks."""

from __future__ import annotations

import pytest
import torch

import ring_la
from tests.support.pool import group
from tests.support.recurrence_cases import make_inputs


def check_deterministic(
    rank: int, P: int, name: str, documents: int, kind: str, T: int = 700
) -> tuple[torch.Tensor, ...]:
    """o, the final state and the gradients of all tokens."""
    cu = None if documents == 0 else (0, 100, 101, 450, 700)
    x = {
        n: t.detach() if isinstance(t, torch.Tensor) else t
        for n, t in make_inputs(name, 1, T, dtype=torch.float32).items()
    }
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    tokens = {n: layout.shard(t).requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor) and t.dim() > 1}
    out = getattr(ring_la, name)(**(x | tokens), layout=layout, output_final_state=True)
    do = torch.randn(1, T, *out.o.shape[2:], generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((out.o * layout.shard(do)).sum(), list(tokens.values()))
    return layout.gather(out.o.detach()), out.final_state.detach(), *(layout.gather(d) for d in grads)


@pytest.mark.parametrize("name", ["retention", "gla", "gated_delta_rule", "kda", "rwkv7", "mamba2"])
def test_deterministic_bits_do_not_depend_on_P(ranks, name):
    for documents in (0, 1):
        for kind in ("contiguous", "zigzag"):
            one = ranks.run(1, check_deterministic, 1, name, documents, kind)[0]
            for P in (2, 4):
                for some in ranks.run(P, check_deterministic, P, name, documents, kind):
                    assert [torch.equal(a, b) for a, b in zip(one, some, strict=True)] == [True] * len(one)


@pytest.mark.parametrize(("name", "T", "P"), [("gated_delta_rule", 66, 2), ("gla", 130, 3)])
def test_deterministic_bits_with_a_short_last_shard(ranks, name, T, P):
    """A shard short enough to go token by token by itself still goes in chunks."""
    one = ranks.run(1, check_deterministic, 1, name, 0, "contiguous", T)[0]
    for some in ranks.run(P, check_deterministic, P, name, 0, "contiguous", T):
        assert [torch.equal(a, b) for a, b in zip(one, some, strict=True)] == [True] * len(one)


def check_deterministic_refusals(rank: int) -> None:
    with pytest.raises(ring_la.ArgumentError, match=r"^scan: expected"):
        ring_la.ContextParallel(group(), scan="doubling", deterministic=True)
    cp = ring_la.ContextParallel(group(), deterministic=True)
    with pytest.raises(ring_la.ArgumentError, match=r"^multiple_of: expected"):
        cp.layout(200, multiple_of=1)
    layout = cp.layout(200)
    x = {n: layout.shard(t).requires_grad_() for n, t in make_inputs("linear_attention", 1, 200).items()}
    for keywords in (dict(mode="recurrent"), dict(causal=False)):
        with pytest.raises(ring_la.UnsupportedError, match="deterministic"):
            ring_la.linear_attention(**x, **keywords, layout=layout)


def test_deterministic_refuses_what_it_cannot_keep(ranks):
    ranks.run(2, check_deterministic_refusals)
