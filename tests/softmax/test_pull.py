"""The ring that copies keys and values from their owner's memory: its order of copies and barriers, on files shared by
the ranks in place of symmetric memory. The GPU's own check is ``tests.gpu.check_attention --transport symmetric``."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from unittest import mock

import torch
import torch.distributed as dist

import ring_la
from ring_la.softmax.strategies import courier
from tests.distributed.pool import group
from tests.softmax.cases import draw, truth
from tests.softmax.test_sharded import KINDS, compare


class Stream:
    """A stream of a machine that does everything at once."""

    def wait_stream(self, other) -> None: ...
    def wait_event(self, event) -> None: ...
    def record_event(self) -> str:
        return "done"


class Shared:
    """Memory of all ranks, as files."""

    def __init__(self, folder: str, own, size: int) -> None:
        self.folder, self.group, self.size = folder, own, size

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        path = f"{self.folder}/{self.size}-{rank}"
        return (
            torch.from_file(path, shared=True, size=self.size, dtype=torch.uint8).view(dtype)[: prod(shape)].view(shape)
        )

    def barrier(self) -> None:
        dist.barrier(self.group)


def check_pull(rank: int, folder: str) -> list[str]:
    cp = ring_la.ContextParallel(group(3), scan="ring")
    cp.transport, cp.comm.side_stream = "symmetric", Stream()  # past the check that asks for NCCL
    with (
        mock.patch.object(courier, "symmetric_memory", lambda own, size: Shared(folder, own.group, size)),
        mock.patch.object(torch.cuda, "current_stream", return_value=Stream()),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
    ):
        bad = []
        for kind in KINDS:
            layout = cp.layout(67, kind)
            for feature in ("causal", "all", "values narrower", "window"):
                errors = compare(layout, draw("uneven", feature), truth("uneven", feature), "ring")
                bad += [f"{kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


def test_pulled_is_whole(ranks, tmp_path):
    bad = ranks.run(3, check_pull, str(tmp_path))
    assert not any(bad), bad
