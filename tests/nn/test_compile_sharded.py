"""Models under a layout compile whole: no break, the numbers of eager mode, and one graph for all lengths
and numbers of documents.

With floats as constants on several ranks, with PyTorch's own settings on one. With those it comes to the same, but
PyTorch traces all of it, finds that it must take them so, and traces all of it again.
"""

from __future__ import annotations

import pytest
import torch

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from tests.nn.cases import DIM
from tests.support.pool import group


def model(layers: list[str], mlp: str = "swiglu") -> HybridLM:
    torch.manual_seed(0)
    options = {"attention": {"num_kv_heads": 2}}
    mlp_options = {"experts": 4, "top_k": 2} if mlp == "moe" else {}
    config = HybridConfig(32, DIM, layers, 4, mlp=mlp, mlp_dim=16, options=options, mlp_options=mlp_options)
    return HybridLM(config).double()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def apart(got: torch.nn.Module, want: torch.nn.Module) -> float:
    """The largest error of a gradient, relative to its parameter's largest."""
    pairs = zip(got.parameters(), want.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-30)) for p, q in pairs)


def check_model(rank: int, layers: list[str], mlp: str, how: dict, lengths: list[int], packed: bool) -> tuple:
    """Errors of loss and gradients against eager calls, and the graphs over all lengths."""
    cp = ContextParallel(group(), **how)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=cp.size > 1):
        return compared(cp, layers, mlp, lengths, packed)


def compared(cp: ContextParallel, layers: list[str], mlp: str, lengths: list[int], packed: bool) -> tuple:
    eager, lm = model(layers, mlp), model(layers, mlp)
    compiled = torch.compile(lm.loss, fullgraph=True, dynamic=True, backend="aot_eager")
    before, worst = graphs(), [0.0, 0.0]
    for i, T in enumerate(lengths):
        cu = [0, T // 3, T // 3, *range(T - 2 - i, T + 1)] if packed else None  # each time a document more
        layout = cp.layout(T, cu_seqlens=cu)
        ids = torch.randint(32, (1, T), generator=torch.Generator().manual_seed(T))
        eager.zero_grad()
        lm.zero_grad()
        want, got = (f(layout.shard(ids), layout=layout) for f in (eager.loss, compiled))
        want.backward()
        got.backward()
        worst = [max(worst[0], abs(float((got - want).detach()))), max(worst[1], apart(lm, eager))]
    return *worst, graphs() - before


CASES = {
    "recurrences": (2, ["rwkv7", "lightning"], "swiglu", {"scan": "ring"}, False),
    "attention": (2, ["attention", "mamba2"], "moe", {"scan": "all_gather", "attention": "all_gather"}, True),
    "heads": (2, ["attention"], "swiglu", {"scan": "doubling", "attention": "ulysses", "head_groups": 2}, False),
    "one rank": (1, ["gdn"], "swiglu", {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_models_compile_whole(ranks, case):
    P, layers, mlp, how, packed = CASES[case]
    lengths = list(range(21, 41)) if case == "heads" else [23, 37]
    for loss, gradients, count in ranks.run(P, check_model, layers, mlp, how, lengths, packed):
        assert loss < 1e-12
        assert gradients < 1e-9
        assert count == 1
