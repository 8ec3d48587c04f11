"""Layers under a layout compile too: the graph breaks at the exchange, and the numbers are those of eager mode."""

from __future__ import annotations

import pytest
import torch

from ring_la import ContextParallel
from tests.nn.cases import DIM, make
from tests.support.pool import group


def check(rank: int, name: str) -> None:
    cp = ContextParallel(group(), scan="ring")
    torch._dynamo.reset()
    eager, layer = make(name), make(name)
    compiled = torch.compile(layer, dynamic=True, backend="aot_eager")
    for T in (23, 37):
        layout = cp.layout(T)
        layout.positions, layout.documents  # noqa: B018  made once, outside the graphs
        whole = torch.randn(1, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
        eager.zero_grad()
        layer.zero_grad()
        expected, out = eager(whole).o, compiled(layout.shard(whole), layout=layout).o
        torch.testing.assert_close(out, layout.shard(expected), rtol=1e-9, atol=1e-9)
        expected.square().sum().backward()
        out.square().sum().backward()
        for p, q in zip(layer.parameters(), eager.parameters(), strict=True):
            grad = cp.comm.all_reduce(p.grad).wait()
            torch.testing.assert_close(grad, q.grad, rtol=1e-9, atol=1e-9 * float(q.grad.abs().max()))


def check_with_constants(rank: int, name: str) -> None:
    """Floats are constants, so that PyTorch traces no graph twice (see tests/nn/test_compile.py)."""
    with torch._dynamo.config.patch(specialize_float=True):
        check(rank, name)


@pytest.mark.parametrize("name", ["gdn", "rwkv7", "attention"])
def test_compiled_layers_on_ranks(ranks, name):
    ranks.run(2, check_with_constants, name)
