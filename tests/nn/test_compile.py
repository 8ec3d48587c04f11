"""torch.compile(fullgraph=True, dynamic=True) of layers, forward and backward, with lengths that change between calls.

Inductor itself where another library's recurrent delta rule died in it; the tracing alone for the other layers. But
for the delta rule floats are constants: otherwise PyTorch traces all of it, finds that it must take them so, and traces
all of it again.
"""

from __future__ import annotations

import pytest
import torch

from tests.nn.cases import DIM, NAMES, RECURRENT, make

pytestmark = pytest.mark.slow

LENGTHS = (9, 33, 70)
INDUCTOR = [("gdn", "chunk"), ("deltanet", "recurrent")]
SAME = "gdn", "hgrn2", "lightning", "mla", "preconditioned_kda", "lightnet", "abc"
"""Made of what others here are made of."""
BROKEN = ("log_linear_mamba2",)
"""Has a graph a length."""
TRACED = [name for name in NAMES if name not in (*SAME, *BROKEN)]


def check(name: str, mode: str, backend: str) -> None:
    torch._dynamo.reset()
    options = {"mode": mode} if name in RECURRENT else {}
    eager, layer = make(name, torch.float32, **options), make(name, torch.float32, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    stats = torch._dynamo.utils.counters["stats"]
    graphs = stats["unique_graphs"]
    for T in LENGTHS:
        x = torch.randn(2, T, DIM, generator=torch.Generator().manual_seed(T))
        eager.zero_grad()
        layer.zero_grad()
        expected, out = (f(x, output_state=True, output_loss=True) for f in (eager, compiled))
        torch.testing.assert_close(out.o, expected.o, rtol=2e-4, atol=2e-5)
        for each in (expected, out):
            own = 0.0 if each.loss is None else each.loss
            (each.o.square().mean() + own).backward()
        for (label, p), q in zip(layer.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=2e-5, msg=lambda m, n=label: f"{n}: {m}")
    assert stats["unique_graphs"] - graphs <= 1, "the graph depends on the length"


@pytest.mark.parametrize("name", TRACED)
def test_layers_trace_whole(name):
    with torch._dynamo.config.patch(specialize_float=True):
        check(name, "chunk", "aot_eager")


@pytest.mark.parametrize(("name", "mode"), INDUCTOR)
def test_layers_compile_whole(name, mode):
    with torch._dynamo.config.patch(specialize_float=name == "gdn"):
        check(name, mode, "inductor")


@pytest.mark.parametrize("name", ["gdn", "ttt"])
def test_decoding_compiles(name):
    torch._dynamo.reset()
    layer = make(name, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 12, DIM)
    with torch.no_grad():
        out = layer(x[:, :5], output_state=True)
        for t in range(5, 12):
            out = compiled(x[:, t : t + 1], state=out.state, output_state=True)
        torch.testing.assert_close(out.o[:, 0], layer(x).o[:, -1], rtol=2e-4, atol=2e-5)
