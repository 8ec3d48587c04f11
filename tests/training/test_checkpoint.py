"""What one split wrote another goes on from."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_la import ArgumentError, ContextParallel, DisagreementError, PeerError
from ring_la.comm import watch
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
    watch.GRACE = 2.0  # of these ranks, which end with the test
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


class Small:
    """A model of so many layers, and its optimizer."""

    def __init__(self, layers: int = 1) -> None:
        self.model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())


PROGRESS = {"tokens": 3, "loader": {"epoch": 1, "order": [1, {"x": 2}], "rest": {}}, "ids": {4: (5, 6)}}


def check_progress(rank: int, folder: str, background: bool) -> None:
    small, checkpoints = Small(), Checkpoints(folder, background=background)
    checkpoints.save(1, small.model, small.optimizer, PROGRESS | {"seed": torch.arange(3)})
    checkpoints.wait()
    dist.barrier()
    found = checkpoints.load(small.model, small.optimizer)
    assert found.pop("seed").tolist() == [0, 1, 2]
    assert found == PROGRESS | {"step": 1}


@pytest.mark.parametrize("background", [True, False])
def test_progress_comes_back_as_it_was(ranks, tmp_path, background):
    """Nested dicts came back in one, empty ones not at all, and with a tensor none of the checkpoint could be read."""
    ranks.run(4, check_progress, str(tmp_path), background)


def check_unreadable(rank: int, folder: str) -> list[str]:
    """What would be written and never read again, on rank 0 alone; and steps that differ, whose parts lay apart."""
    small, checkpoints, said = Small(), Checkpoints(folder, background=False), []
    for step, progress in ((1, {"where": Path("here")}), (1, None), (-1, {}), ("1", {}), (7, {})):
        given = (step, progress) if rank == 0 else (1, {})
        with pytest.raises((ArgumentError, DisagreementError)) as error:
            checkpoints.save(given[0], small.model, small.optimizer, given[1])
        said.append(f"{type(error.value).__name__}: {error.value}")
    assert checkpoints.steps() == []
    return said


def test_what_could_not_be_read_again_is_not_written(ranks, tmp_path):
    first, second, *_ = ranks.run(4, check_unreadable, str(tmp_path))
    expected = ["progress: expected plain values and tensors, .*, at 'where', got PosixPath"]
    expected += ["progress: expected a dict", *["step: expected an int ≥ 0, got .*1"] * 2]
    for mine, theirs, want in zip(first, second, expected):
        assert re.match(f"ArgumentError: {want}", mine)
        assert re.search(rf"^DisagreementError: .*\n  rank 0: refused: {want}.*\n  rank 1: 1\n", theirs)
    assert first[-1] == second[-1]
    assert "\n  rank 0: 7\n  rank 1: 1" in first[-1]


def check_full(rank: int, folder: str, background: bool) -> None:
    """Rank 1 alone has no room for its part of a checkpoint."""
    model = fully_shard(torch.nn.Linear(128, 128, bias=False), mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints, most = Checkpoints(folder, background=background), resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step: int) -> None:
        checkpoints.save(step, model, optimizer, {"at": step})
        checkpoints.wait()

    save(1)
    for step in (1, 2):  # written over, and new
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        try:
            with pytest.raises(ArgumentError, match=r"folder: expected one that allows writing .* \(rank 1: "):
                save(step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        dist.barrier()
        assert checkpoints.steps() == []
        assert not list(Path(folder).iterdir())
    save(3)
    assert checkpoints.load(model, optimizer)["at"] == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_everywhere_and_leaves_nothing(ranks, tmp_path, background):
    """It was an error that no `except Exception` catches; its files took the room of the next, and a checkpoint that
    was written over counted as complete."""
    ranks.run(4, check_full, str(tmp_path), background, timeout=40)


def check_more(rank: int, folder: str) -> None:
    two, one, checkpoints = Small(2), Small(1), Checkpoints(folder, keep=1, background=False)
    checkpoints.save(1, two.model, two.optimizer, {})
    with pytest.raises(ArgumentError, match=r"model: expected all that .*step-00000001 has of one, got .* 1\.weight"):
        checkpoints.load(one.model, one.optimizer)
    for name, wrong in (("model", (two.optimizer, two.model)), ("optimizer", (two.model, None))):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a"):
            checkpoints.load(*wrong)
        with pytest.raises(ArgumentError, match=f"^{name}: expected a"):
            checkpoints.save(2, *wrong, {})
    checkpoints.save(2, two.model, two.optimizer, {})  # and removes step 1, beside folders of other names
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["step-", "step-00000002", "step-x"]


def test_a_model_that_has_less_is_refused(ranks, tmp_path):
    """It was filled with the layers it has."""
    for name in ("step-", "step-x"):
        (tmp_path / name).mkdir()
    ranks.run(4, check_more, str(tmp_path))


@pytest.mark.parametrize(
    "wrong", [{"keep": 1.5}, {"keep": True}, {"background": "no"}, {"frozen": None}, {"folder": 3}]
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}: expected"):
        Checkpoints(**{"folder": "runs", **wrong})
