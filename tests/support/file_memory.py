"""Groups whose ranks copy from each other's memory, which is files that they share, in place of symmetric memory."""

from __future__ import annotations

import time
from unittest import mock

import torch
import torch.distributed as dist

import ring_la
from ring_la.comm import memory as module
from ring_la.comm.memory import SECTOR, Memory
from tests.support.pool import group


class Files(Memory):
    """Memory of all ranks as files; copies are done at once, and flags by Python or by the kernels, interpreted."""

    folder = ""
    by_kernels = False
    opened = 0

    @classmethod
    def open(cls, own, size: int) -> Files:
        total = module._head(own.size) + -(-size // 16) * 16
        Files.opened += 1
        names = [f"{cls.folder}/{own.size}-{total}-{Files.opened}-{r}" for r in range(own.size)]
        seen = [torch.from_file(n, shared=True, size=total, dtype=torch.uint8) for n in names]
        dist.barrier(own.group)  # who makes a file writes its first byte, which is rank 0's flag, and two may make it
        return cls(own, seen)

    def _launch(self, name: str, *numbers: int) -> None:
        if self.by_kernels:
            super()._launch(name, *numbers)
        elif name == "arrived":
            for r in range(self.members.size):
                if numbers[0] >> r & 1:
                    self._take(r)
        else:
            dist.barrier(self.members.group)

    def _take(self, rank: int) -> None:
        flag, deadline = self._own[rank * SECTOR // 4 :][:1], time.monotonic() + 60
        while not flag.item():
            assert time.monotonic() < deadline, f"nothing from rank {rank}"
            time.sleep(0)
        flag.zero_()


def over_files(P: int, folder: str, by_kernels: bool = False):
    """A group whose ranks copy from each other's memory, as on the GPUs of one host."""
    cp = ring_la.ContextParallel(group(P), scan="ring")
    cp.comm.copies = True
    Files.folder, Files.by_kernels, Files.opened = folder, by_kernels, 0
    return cp, mock.patch.object(Memory, "open", Files.open)
