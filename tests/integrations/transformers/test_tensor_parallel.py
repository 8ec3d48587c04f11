"""Tensor parallelism by the library's plans beside a context axis: losses and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.tensor_parallel")

from tests.support.gpu import on_gpus
from tests.support.pool import group
from tests.support.transformers_models import CASES

from .test_calls import close, gradients, ids
from .test_trainer_shards import arguments, join
from .test_training import accelerate_of_its_own


def check(rank: int, names: list[str], folder: str) -> dict[str, int]:
    """In the pool: on 2 tensor × 2 context ranks; how many parameters of each model are cut. Written to the folder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    import ring_la
    from ring_la.errors import ArgumentError, UnsupportedError
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.tensor_parallel import tensor_parallel
    from ring_la.integrations.transformers.weights import save_weights
    from ring_la.integrations.transformers.weights.parts import ModelRanks
    from ring_la.training import TrainingMesh, clip_gradients, shard_parameters, sum_gradients

    training = TrainingMesh.make(torch.get_default_device().type, fsdp=2, context=2)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("tensor", "context"))
    cp = ring_la.ContextParallel(mesh["context"], scan="ring", attention="ring")
    x, found = ids(2), {}
    for name in names:
        alone = CASES[name].make()
        want = alone(input_ids=x, labels=x, use_cache=False)
        want.loss.backward()
        expected = gradients(alone)
        with pytest.raises(ArgumentError, match="model: expected one that parallelize was given"):
            tensor_parallel(alone, mesh["tensor"])
        model = parallelize(CASES[name].make(), cp)
        with pytest.raises(ArgumentError, match="mesh: expected one axis with at most one of the context ranks"):
            tensor_parallel(model, mesh["context"])
        tensor_parallel(model, mesh["tensor"])
        got = model(input_ids=x, labels=x, use_cache=False)
        got.loss.backward()
        close(got.loss, want.loss)
        sum_gradients(model.parameters(), cp)
        cut = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        for n, p in model.named_parameters():
            grad = torch.zeros(p.shape) if p.grad is None else p.grad
            close(grad.full_tensor() if n in cut else grad, expected[n], msg=lambda m, n=n: f"{n}: {m}")
        norm = torch.nn.utils.get_total_norm(list(expected.values()))
        close(clip_gradients(model.parameters(), float(norm) / 4), norm)
        for n, p in model.named_parameters():
            if p.grad is not None:
                close(4 * (p.grad.full_tensor() if n in cut else p.grad), expected[n])
        written = ModelRanks(model)
        assert (written.index, written.size) == (rank, 4)  # two were the first to write, the copies' groups
        save_weights(model, f"{folder}/{name}")
        with pytest.raises(UnsupportedError, match="save_pretrained: expected save_weights, called on every rank"):
            model.save_pretrained(f"{folder}/other")
        with pytest.raises(UnsupportedError, match=r"model: expected parameters .*weight, cut over ranks \["):
            shard_parameters(model, training, blocks=model.model.layers)
        found[name] = len(cut)
    for name, message in (
        ("mamba2", "model: expected one with a tensor p"),
        ("gemma3", "tie_word_embeddings: expected F"),
    ):
        other = parallelize(CASES[name].make(), cp, check=False)
        with pytest.raises(UnsupportedError, match=message):
            tensor_parallel(other, mesh["tensor"])
    return found


def test_two_by_two_ranks_are_one_process(ranks, tmp_path):
    """Clipped and written, too."""
    for found in ranks.run(4, check, ["qwen3", "qwen3_next"], str(tmp_path)):
        assert found["qwen3"] >= 2 * 7  # layers, and q, k, v, o, gate, up and down of each
        assert found["qwen3_next"] > 3
    for name in ("qwen3", "qwen3_next"):
        alone = CASES[name].make()
        written = type(alone).from_pretrained(tmp_path / name).state_dict()
        torch.testing.assert_close(written, alone.state_dict(), rtol=0, atol=0)


def check_strangers(rank: int) -> None:
    """What one of two tensor ranks is given otherwise; each is a context of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import ring_la
    from ring_la.errors import ArgumentError, DisagreementError, UnsupportedError
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.tensor_parallel import tensor_parallel

    mesh = DeviceMesh.from_group(group(2), "cpu")
    cp = ring_la.ContextParallel(dist.new_group([rank], use_local_synchronization=True), scan="ring")

    def given(model):
        return parallelize(model, cp, check=False)

    with pytest.raises(ArgumentError, match="mesh: expected a DeviceMesh of one axis, got str"):
        tensor_parallel(given(CASES["qwen3"].make()), "tensor")
    few = CASES["qwen3"].make().config
    few.num_key_value_heads, few.num_attention_heads = 1, 3
    with pytest.raises(
        UnsupportedError, match="num_attention_heads: expected a multiple of the 2 ranks of mesh, got 3"
    ):
        tensor_parallel(given(type(CASES["qwen3"].make())(few)), mesh)
    model = given(CASES["qwen3"].make())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += rank
    with pytest.raises(DisagreementError, match="the weights, of which every rank must have the same"):
        tensor_parallel(model, mesh)
    model = tensor_parallel(given(CASES["qwen3"].make()), mesh)
    with pytest.raises(DisagreementError, match="the whole batch, which every rank must be given"):
        model(input_ids=ids(1) + rank)


def test_what_tensor_ranks_are_given_is_compared(ranks):
    """Other weights were cut and mixed without a word, other tokens too; of another length they ended a process."""
    ranks.run(2, check_strangers, timeout=40)


def check_trainer(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import ring_la
    from ring_la.errors import UnsupportedError
    from ring_la.integrations.transformers import ContextTrainer, parallelize
    from ring_la.integrations.transformers.tensor_parallel import tensor_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "context"))
    cp = ring_la.ContextParallel(mesh["context"], scan="ring", attention="ring")
    model = tensor_parallel(parallelize(CASES["qwen3"].make(), cp, average=True, check=False), mesh["tensor"])
    with accelerate_of_its_own():
        join(rank)
        with pytest.raises(UnsupportedError, match=r"model: expected one that is .*weight, cut\. Train what"):
            ContextTrainer(model=model, args=arguments(Path(folder)))


def test_the_trainer_refuses_a_cut_model_by_name(ranks, tmp_path):
    """It asked for `shard_parameters(…, average=True)`."""
    ranks.run(4, check_trainer, str(tmp_path))


@pytest.mark.gpu
def test_two_by_two_ranks_on_gpus(gpu_ranks, tmp_path):
    assert all(found["qwen3"] >= 2 * 7 for found in on_gpus(gpu_ranks, 4, check, ["qwen3"], str(tmp_path)))
