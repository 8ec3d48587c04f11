"""What holds of layers and models split over CPUs' ranks holds over GPUs': outputs, states, every gradient, in fp64.

    pytest -m gpu tests/gpu/test_layers_split.py                     # a GPU a rank
    pytest -m gpu tests/gpu/test_layers_split.py --gpu-ranks 4       # four ranks on the GPUs there are

The checks are those of the tests on CPUs, of tensors made on the rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import recompute
from tests.nn import test_moe_split, test_sharded
from tests.nn.cases import NAMES
from tests.support.pool import Ranks, group

pytestmark = pytest.mark.gpu


def on_gpu(rank: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """The check, with what it makes on this rank's GPU."""
    with torch.device("cuda"):
        return check(rank, *arguments)


def run(pool: Ranks, P: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    if pool.size < P:
        pytest.skip(f"needs {P} ranks, {pool.size} are here")
    return pool.run(P, on_gpu, check, *arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["two ranks", "three ranks, packed"])
def test_split_layers_are_whole(gpu_ranks, name, case):
    P, kind, cu = test_sharded.CASES[case]
    run(gpu_ranks, P, test_sharded.check, name, kind, cu)


@pytest.mark.parametrize("P", [2, 4])
def test_a_mixture_in_a_split_model(gpu_ranks, P):
    run(gpu_ranks, P, test_moe_split.check_split, *test_moe_split.SPLITS["packed"])


def check_recomputed(rank: int, keep: bool) -> None:
    """A split model whose blocks are recomputed, or all but attention's results, beside the whole one."""
    cp = ContextParallel(group(), scan="ring", attention="ring")
    cu, ids = [0, 5, 40, 64], (torch.arange(64) % 19)[None]
    layout = cp.layout(64, "zigzag", cu_seqlens=cu)

    def made() -> HybridLM:
        torch.manual_seed(0)
        return HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2)).double()

    whole, split = made(), recompute(made(), ["block", "norm"], keep_attention=keep)
    want = whole.loss(ids, cu_seqlens=torch.tensor(cu))
    want.backward()
    got = split.loss(layout.shard(ids), layout=layout)
    got.backward()
    test_moe_split.same(cp.comm.all_reduce(got.detach()).wait(), want, "loss")
    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        test_moe_split.same(cp.comm.all_reduce(p.grad).wait(), q.grad, name)


@pytest.mark.parametrize("keep", [False, True], ids=["all", "all but attention"])
def test_recomputed_blocks(gpu_ranks, keep):
    run(gpu_ranks, 2, check_recomputed, keep)


@pytest.mark.parametrize(("P", "name"), [(2, "qwen3_5_moe"), (2, "nemotron_h"), (3, "gpt_oss")])
def test_experts_over_the_ranks(gpu_ranks, P, name):
    pytest.importorskip("transformers")
    from tests.integrations.transformers import test_experts

    run(gpu_ranks, P, test_experts.modules, name)


def test_tensor_parallel_beside_the_context_axis(gpu_ranks):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    from tests.integrations.transformers import test_tensor_parallel

    found = run(gpu_ranks, 4, test_tensor_parallel.check, ["qwen3"])
    assert all(cut["qwen3"] > 0 for cut in found)
