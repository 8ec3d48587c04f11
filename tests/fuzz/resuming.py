"""Training that stops after a step and goes on from its checkpoint, split in another way."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import Checkpoints, TrainingMesh, shard_parameters

from .case import Case

AXES: dict[str, dict[str, int]] = {
    "context": {"context": 4},
    "data2": {"data": 2, "context": 2},
    "fsdp2": {"fsdp": 2, "context": 2},
    "fsdp": {"fsdp": 4},
}


class Training:
    """A run of four sequences a step."""

    def __init__(self, case: Case, seed: int, axes: str) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.mesh = TrainingMesh.make("cpu", **AXES[axes])
        self.cp = ContextParallel(self.mesh.context, scan="ring", timeout=60.0)
        model = HybridLM(HybridConfig(19, 8, case.how["layers"], 2)).double()
        self.model = shard_parameters(model, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        layout = self.cp.layout(self.case.T)
        ids = torch.arange(self.case.T)[None] * 7 % 19
        for i in range(self.mesh.replica, 4, self.mesh.replicas):
            self.model.loss(layout.shard(ids + i) % 19, layout=layout, total=4 * (self.case.T - 1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters()]


def resume(case: Case) -> str:
    """What differs, in words; nothing: empty."""
    folder = [tempfile.mkdtemp(prefix="ring_la-fuzz-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        first = Training(case, case.seed % 1000, case.how["first"])
        checkpoints = Checkpoints(folder[0], background=bool(case.how.get("background")))
        first.step()
        checkpoints.save(1, first.model, first.optimizer, {"seen": 4})
        first.step()
        checkpoints.wait()
        dist.barrier()
        second = Training(case, 1 + case.seed % 1000, case.how["second"])
        progress = Checkpoints(folder[0]).load(second.model, second.optimizer)
        second.step()
        if progress != {"step": 1, "seen": 4}:
            return f"progress is {progress}"
        off = [float((a - b).norm() / b.norm()) for a, b in zip(second.parameters(), first.parameters(), strict=True)]
        return "" if max(off) < 1e-8 else f"parameters after the resumed step: {max(off):.1e}"
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
