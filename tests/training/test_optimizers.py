"""AdamW by name: PyTorch's, and torchao's where it is installed, on sharded parameters too."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from ring_la import ArgumentError, UnsupportedError
from ring_la.training import Checkpoints, adamw
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


class FewBits:
    """A run whose weights are cut over the last axis. A block of moments is two rows of 277: of four ranks the last has
    no whole blocks, and of two the first, so that the other's blocks begin within blocks of the four."""

    def __init__(self, kind: str, seed: int, *axes: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        self.width = {"adamw8bit": 128, "adamw4bit": 64}[kind]
        self.model = torch.nn.Sequential(torch.nn.Linear(self.width, 277), torch.nn.Tanh(), torch.nn.Linear(277, 7))
        fully_shard(self.model, mesh=init_device_mesh("cpu", axes, mesh_dim_names=("copies", "shards")[-len(axes) :]))
        self.optimizer = adamw(kind, self.model.parameters(), weight_decay=0.0, **OPTIONS)

    def steps(self, first: int, last: int) -> torch.Tensor:
        """Steps, each with a learning rate that is set as a float; all weights after them."""
        for i in range(first, last):
            for g in self.optimizer.param_groups:
                g["lr"] = 1e-2 / (1 + i)
            x = torch.randn(16, self.width, generator=torch.Generator().manual_seed(i))
            (self.model(x) - x[:, :7]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.weights()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.full_tensor().detach().flatten() for p in self.model.parameters()])

    def states(self) -> list[torch.Tensor]:
        return [x for state in self.optimizer.state.values() for x in state.values()]

    def moments(self, name: str) -> torch.Tensor:
        states = self.optimizer.state_dict()["state"].values()
        assert {state[name].dtype for state in states} == {torch.float32}
        return torch.cat([state[name].full_tensor().flatten() for state in states])


def check_few_bits_go_on(rank: int, kind: str, folder: str, within: float) -> list[bool]:
    """Written in the background, read on two splits; whether this rank has moments of few bits on the one and other."""
    with torch.compiler.set_stance("force_eager"):
        checkpoints, first = Checkpoints(folder), FewBits(kind, 0, 4)
        at_three = first.steps(0, 3)
        checkpoints.save(3, first.model, first.optimizer, {})
        moments = {name: first.moments(name) for name in ("exp_avg", "exp_avg_sq")}
        at_six = first.steps(3, 6)
        checkpoints.wait()
        same, other = FewBits(kind, 1, 4), FewBits(kind, 2, 2, 2)
        for run in (same, other):
            assert checkpoints.load(run.model, run.optimizer) == {"step": 3}
            assert [g["lr"] for g in run.optimizer.param_groups] == pytest.approx([1e-2 / 3])
            assert torch.equal(run.weights(), at_three)
        for name, moment in moments.items():
            assert torch.equal(same.moments(name), moment)
            assert (other.moments(name) - moment).abs().max() <= within * moment.abs().max()
        assert torch.equal(same.steps(3, 6), at_six)
        assert (other.steps(3, 6) - at_six).norm() <= within * (at_six - at_three).norm()
        return [any(hasattr(x.to_local(), "qmap") for x in run.states() if x.dim()) for run in (first, other)]


@pytest.mark.parametrize(("kind", "within"), [("adamw8bit", 0.02), ("adamw4bit", 0.2)])
def test_few_bits_go_on_from_a_checkpoint_on_other_ranks(ranks, tmp_path, kind, within):
    """With the same ranks to the last bit. No float was taken for `lr`, and no other number of ranks went on."""
    pytest.importorskip("torchao")
    found = ranks.run(4, check_few_bits_go_on, kind, str(tmp_path), within)
    assert found == [[True, False], [True, True], [True, False], [False, True]]


def test_compiled_steps_take_no_graph_of_other_ranks(monkeypatch):
    """Of a cache that knows a shard by its whole shape: ranks with 129 and 128 rows, and 4 bits after 8, got each
    other's."""
    pytest.importorskip("torchao")
    from torch._functorch import config

    from ring_la.training import few_bits

    seen = []
    step = lambda self, closure=None: seen.append(config.enable_autograd_cache)  # noqa: E731
    monkeypatch.setattr(few_bits.optim.AdamW8bit, "step", step)
    with config.patch(enable_autograd_cache=True):
        adamw("adamw8bit", [torch.nn.Parameter(torch.zeros(1))]).step()
        assert config.enable_autograd_cache
    assert seen == [False]


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
