"""AdamW by name: PyTorch's, and torchao's where it is installed, on sharded parameters too."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from ring_la import ArgumentError, UnsupportedError
from ring_la.training import adamw
from tests.support.pool import group

OPTIONS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def steps(kind: str, shard: bool) -> tuple[float, float]:
    """Loss before and after ten steps of a small regression, its weights sharded over a group or not."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(64, 128), torch.randn(32, 64), torch.randn(32, 128)
    if shard:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(group(), "cpu"))
    optimizer = adamw(kind, [{"params": list(model.parameters()), "weight_decay": 0.0}], **OPTIONS)
    losses = []
    for _ in range(11):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_the_kinds_are_checked():
    assert steps("adamw", False)[1] < steps("adamw", False)[0]
    with pytest.raises(ArgumentError, match="kind: expected 'adamw' or one of adamw8bit"):
        adamw("sgd", [torch.nn.Parameter(torch.zeros(1))])
    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(UnsupportedError, match=r"ring_la\[low-memory\]"):
            adamw("adamw8bit", [torch.nn.Parameter(torch.zeros(1))])


def test_on_cuda_it_is_the_fused_one(monkeypatch):
    """Unless the caller says which; elsewhere PyTorch decides."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **options: options)
    there, here = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert adamw("adamw", [{"params": [there]}, {"params": [there, there]}], lr=1.0) == {"lr": 1.0, "fused": True}
    assert adamw("adamw", [there], foreach=True) == {"foreach": True}
    assert adamw("adamw", iter([there, here])) == {}


def on_two_meshes(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    found = []
    meshes = (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)))
    for fused in (False, True):
        torch.manual_seed(0)
        weights = [
            torch.nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Shard(1)][: mesh.ndim]))
            for mesh in meshes
        ]
        optimizer = adamw("adamw", weights, fused=fused, **OPTIONS)
        for _ in range(3):
            for w in weights:
                w.grad = w.detach().sin()
            optimizer.step()
        found.append([w.full_tensor().detach() for w in weights])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_the_fused_one_takes_parameters_of_several_meshes(ranks):
    """Experts are sharded over other ranks than the rest."""
    ranks.run(4, on_two_meshes)


def sharded(rank: int, kind: str) -> tuple[float, float]:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step; eagerly it is the same arithmetic
        return steps(kind, True)


@pytest.mark.parametrize(("kind", "within"), [("adamw8bit", 0.03), ("adamw4bit", 0.4)])
def test_few_bits_train_as_many_do(ranks, kind, within):
    pytest.importorskip("torchao")
    whole = steps("adamw", False)
    for first, last in ranks.run(2, sharded, kind):
        assert first == pytest.approx(whole[0], rel=1e-5)
        assert last == pytest.approx(whole[1], rel=within)


def test_a_group_may_hold_what_can_be_gone_through_once():
    """As PyTorch's own optimizers take it; there were no parameters left in the group, and nothing was trained."""
    model = torch.nn.Linear(3, 2)
    (group,) = adamw("adamw", [{"params": model.parameters(), "lr": 0.1}]).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    named = adamw("adamw", model.named_parameters()).param_groups[0]
    assert len(named["params"]) == 2
    assert adamw("adamw", [{"params": model.weight}]).param_groups[0]["params"] == [model.weight]
    gone = model.parameters()
    assert len([*gone]) == 2
    for wrong in (gone, [], [{"params": gone}]):
        with pytest.raises(ArgumentError, match="parameters: expected at least one, got none"):
            adamw("adamw", wrong)
    for wrong in (model, 3, [3]):
        with pytest.raises(ArgumentError, match="parameters: expected parameters, such as"):
            adamw("adamw", wrong)
