"""`ring_la.capture` of whole steps: `pytest -m gpu tests/gpu/test_capture_step.py`.

train     forward, backward and AdamW of a small hybrid: the losses of as many eager steps, over two lengths; the
          same of a compiled loss, and of layers of Qwen3-Next through Transformers
named     what cannot be captured, by the line it stands in
ended     a process group whose messages were in a graph
late      a rank that does not replay: a PeerError on the others, within the timeout
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import ring_la
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import sum_gradients
from tests.support import pool

pytestmark = pytest.mark.gpu
LENGTHS = (512, 768)


def trainer(cp: ring_la.ContextParallel | None, ranks: int, compiled: bool):
    """A step of a small hybrid on this rank's tokens of a sequence, and its optimizer."""
    torch.manual_seed(0)
    config = HybridConfig(256, 256, ["gdn", "lightning", "attention"], 4, options={"attention": {"head_dim": 64}})
    with torch.device("cuda"):
        model = HybridLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    layouts = {} if cp is None else {n: cp.layout(n) for n in LENGTHS}
    loss_of = torch.compile(model.loss, fullgraph=True) if compiled else model.loss

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        layout = layouts.get(ids.shape[1] * ranks)
        optimizer.zero_grad()
        loss = loss_of(ids, targets, layout=layout)
        loss.backward()
        if cp is not None:
            sum_gradients(model.parameters(), cp)
        optimizer.step()
        return loss.detach()

    return step, layouts


def batch(n: int, length: int) -> torch.Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(n)).cuda()


def losses(
    cp: ring_la.ContextParallel | None, captured: bool, compiled: bool = False, steps: int = 12
) -> tuple[list[float], int]:
    """Of steps over both lengths in turn, and how many graphs there are."""
    ranks = 1 if cp is None else cp.size
    step, layouts = trainer(cp, ranks, compiled)
    if captured:
        step = ring_la.capture(step, cp)
    out = []
    for n in range(steps):
        ids = batch(n % 2, LENGTHS[n % 2])
        targets = ids.roll(-1, 1)
        if cp is not None:
            ids, targets = (layouts[ids.shape[1]].shard(x) for x in (ids, targets))
        out.append(step(ids, targets).clone())
    if captured:
        step.wait()
    return [float(x) for x in out], step.graphs if captured else 0


def check_train(rank: int, transport: str | None, compiled: bool = False) -> tuple[float, int]:
    """How far captured losses are from eager ones, at most."""
    cp = None if transport is None else ring_la.ContextParallel(pool.group(), scan="ring", transport=transport)
    want, _ = losses(cp, False)
    got, graphs = losses(cp, True, compiled)
    assert got[-1] < got[0]
    return max(abs(a - b) for a, b in zip(got, want)), graphs


def check_train_of_transformers(rank: int) -> float:
    """How far captured losses of Qwen3-Next's layers are from eager ones, at most."""
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    from ring_la.integrations.transformers import parallelize

    cp = ring_la.ContextParallel(pool.group())
    config = Qwen3NextConfig(
        **{"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_only_layers": [0, 1, 2, 3], "use_cache": False},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    )
    layout, found = cp.layout(LENGTHS[0]), []
    for captured in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = parallelize(model, cp, check=False)

        def step(ids: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, layout=layout).loss
            loss.backward()
            return loss.detach()

        run = ring_la.capture(step, cp, warmup=2) if captured else step
        found.append([float(run(layout.shard(batch(n, LENGTHS[0]))).clone()) for n in range(6)])
    assert run.graphs == 1
    return max(abs(a - b) for a, b in zip(*found))


def check_ended(rank: int) -> float:
    """Seconds until a group is gone, after its graph."""
    group = dist.new_group()
    cp = ring_la.ContextParallel(group, transport="torch", timeout=20)
    step = ring_la.capture(lambda x: cp.comm.all_reduce(x).wait(), cp, warmup=1)
    for _ in range(3):
        out = step(torch.ones(8, device="cuda"))
    step.wait()
    assert (float(out[0]), step.graphs) == (cp.size, 1)
    step.release()
    assert step.graphs == 0
    began = time.monotonic()
    dist.destroy_process_group(group)
    return time.monotonic() - began


def check_late(rank: int) -> tuple[float, str] | None:
    """The last rank does not replay its step; the others say when they knew, and who it is."""
    cp = ring_la.ContextParallel(pool.group(), transport="torch", timeout=4)
    x = torch.ones(8, device="cuda")
    step = ring_la.capture(lambda x: cp.comm.all_reduce(x).wait(), cp, warmup=1)
    for _ in range(3):
        out = step(x)
    step.wait()
    assert float(out[0]) == cp.size
    if rank == cp.size - 1:
        return None
    began = time.monotonic()
    step(x)
    with pytest.raises(ring_la.PeerError) as error:
        step.wait()
    return time.monotonic() - began, str(error.value)


def test_train(record_property):
    worst, graphs = check_train(0, None)
    record_property("worst", worst)
    assert worst < 2e-2
    assert graphs == 2


def test_train_compiled(record_property):
    worst, graphs = check_train(0, None, True)
    record_property("worst", worst)
    assert worst < 2e-2
    assert graphs == 2


@pytest.mark.gpu(needs=2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_train_on_ranks(transport, compiled, gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_train, transport, compiled)
    record_property("worst", max(worst for worst, _ in found))
    assert max(worst for worst, _ in found) < 2e-2
    assert [graphs for _, graphs in found] == [2] * len(found)


@pytest.mark.gpu(needs=2)
def test_train_of_transformers(gpu_ranks, record_property):
    worst = max(gpu_ranks.run(gpu_ranks.size, check_train_of_transformers))
    record_property("worst", worst)
    assert worst < 2e-2


def test_what_cannot_be_captured_is_named():
    x = torch.ones(4, device="cuda")
    for says, line in {
        "synchronizing": lambda x: x * x.sum().item(),
        "CPU generator": lambda x: x * float(torch.rand(())),
    }.items():
        step = ring_la.capture(line, warmup=1)
        with pytest.raises(ring_la.UnsupportedError, match=says) as error:
            [step(x) for _ in range(2)]
        assert "test_capture_step.py" in str(error.value) or says == "CPU generator"


@pytest.mark.gpu(needs=2)
def test_a_group_ends_after_its_graphs(gpu_ranks, record_property):
    seconds = max(gpu_ranks.run(gpu_ranks.size, check_ended, timeout=60))
    record_property("seconds", seconds)
    assert seconds < 10


@pytest.mark.gpu(needs=2)
def test_late(gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_late)
    gpu_ranks.stop()  # a graph waits for ever
    seconds, error = found[0]
    record_property("seconds", seconds)
    assert f"rank {gpu_ranks.size - 1}" in error
    assert seconds < 15
