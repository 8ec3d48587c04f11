"""What one split wrote another goes on from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ring_la import ArgumentError, ContextParallel, PeerError
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import Checkpoints, TrainingMesh, recompute, shard_parameters

IDS = torch.arange(24)[None] % 19


class Half:
    """A run of this split: two sequences a step."""

    def __init__(self, seed: int, **axes: int) -> None:
        torch.manual_seed(seed)
        self.mesh = TrainingMesh.make("cpu", **axes)
        self.cp = ContextParallel(self.mesh.context, scan="ring")
        model = HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2)).double()
        self.model = shard_parameters(recompute(model, ["gdn"]), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, n: int) -> None:
        layout = self.cp.layout(24)
        for _ in range(n):
            for i in range(self.mesh.replica, 2, self.mesh.replicas):
                self.model.loss(layout.shard(IDS + i) % 19, layout=layout, total=46).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [p.full_tensor() for p in self.model.parameters()]


def check_other_split(rank: int, folder: str, background: bool) -> None:
    first = Half(0, context=4)
    checkpoints = Checkpoints(folder, keep=1, background=background)
    assert checkpoints.load(first.model, first.optimizer) is None
    first.steps(1)
    checkpoints.save(1, first.model, first.optimizer, {"tokens": 48})
    first.steps(1)
    checkpoints.save(2, first.model, first.optimizer, {"tokens": 96})
    first.steps(2)  # while it is written
    checkpoints.wait()
    dist.barrier()
    assert checkpoints.steps() == [2]
    (Path(folder) / "step-00000009").mkdir(exist_ok=True)  # begun, not finished
    for axes in ({"data": 2, "context": 2}, {"fsdp": 2, "context": 2}):
        second = Half(1, **axes)
        progress = Checkpoints(folder).load(second.model, second.optimizer)
        assert progress == {"step": 2, "tokens": 96}
        second.steps(2)
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    with pytest.raises(ArgumentError, match=r"step: expected one of \[2\], got 7"):
        checkpoints.load(first.model, first.optimizer, step=7)


@pytest.mark.parametrize("background", [True, False])
def test_another_split_goes_on(ranks, tmp_path, background):
    ranks.run(4, check_other_split, str(tmp_path), background)


def check_death(rank: int, folder: str, moment: str, background: bool) -> str:
    """Rank 1 ends where the others write, wait for what is written, or read."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    checkpoints = Checkpoints(folder, background=background)
    if moment == "read":
        checkpoints.save(1, model, optimizer, {"tokens": 1})
        checkpoints.wait()
        dist.barrier()
    if rank == 1:
        os._exit(1)

    def read() -> None:
        checkpoints.load(model, optimizer)

    def written() -> None:
        checkpoints.save(2, model, optimizer, {"tokens": 2})
        checkpoints.wait()

    do = read if moment == "read" else written
    with pytest.raises(PeerError) as error:
        do()
    with pytest.raises(PeerError, match="checkpoint: the ranks' group has ended with a failure before"):
        do()
    return str(error.value)


@pytest.mark.parametrize(("moment", "background"), [("written", False), ("written", True), ("read", False)])
def test_a_rank_that_dies_at_a_checkpoint_is_named(ranks, tmp_path, moment, background):
    found = "writing" if moment == "written" else "reading"
    for rank, said in zip((0, 2, 3), ranks.run(4, check_death, str(tmp_path), moment, background, dying=(1,))):
        assert said.startswith(f"rank {rank} of 4 failed while {found} a checkpoint: no sign of life from rank 1")
