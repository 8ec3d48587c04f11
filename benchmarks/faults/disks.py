"""Checkpoints on a disk that is full, cut off by a kill, or changed afterwards."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ring_la.training import Checkpoints

from . import job
from .job import VICTIM, Rank, Said


def _model(rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(1024, rows)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def full(at: Rank, folder: str, background: bool) -> None:
    """The second checkpoint does not fit; the first is still there and is read."""
    small, big = _model(16), _model(1024)
    checkpoints = Checkpoints(folder, background=background)
    checkpoints.save(1, *small, {"tokens": 1})
    checkpoints.wait()
    at.ready()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)) if not os.path.ismount(folder) else None
    checkpoints.save(2, *big, {"tokens": 2})
    checkpoints.wait()


def killed(at: Rank, folder: str, background: bool) -> None:
    """A rank is killed while all write."""
    model = _model(8192)
    checkpoints = Checkpoints(folder, background=background)
    checkpoints.save(1, *_model(16), {"tokens": 1})
    checkpoints.wait()
    at.ready()
    checkpoints.save(2, *model, {"tokens": 2})
    checkpoints.wait()


def read(at: Rank, folder: str, rows: int) -> None:
    """What the next start reads."""
    model, optimizer = _model(rows)
    checkpoints = Checkpoints(folder)
    at.ready()
    progress = checkpoints.load(model, optimizer)
    dist.barrier()
    if progress != {"step": 1, "tokens": 1}:
        raise RuntimeError(f"went on from {progress}")


def rows() -> Iterator[dict[str, Any]]:
    """A row for each fault."""
    for background in (False, True):
        how = "in the background" if background else "in turn"
        with disk("8m") as folder:
            said, _ = job.run(partial(full, folder=folder, background=background), "none", size=2)
            yield _row(f"a checkpoint, written {how}", "full disk", said, folder)
        with disk("512m") as folder:
            said, _ = job.run(partial(killed, folder=folder, background=background), "kill -9", size=2)
            yield _row(f"a checkpoint, written {how}", "kill -9", said, folder)
    for fault, damage in (("shard cut off", cut), ("shard gone", gone), ("a byte changed", changed)):
        with disk("64m") as folder:
            job.run(partial(written, folder=folder), "none", size=2)
            for file in sorted(Path(folder).glob("step-*/*.distcp"))[:1]:
                damage(file)
            said, _ = job.run(partial(read, folder=folder, rows=16), "none", size=2)
            yield {"moment": "a checkpoint, read", "fault": fault, "said": [s._asdict() for s in said],
                   "restart": "–", "left behind": []}  # fmt: skip


def written(at: Rank, folder: str) -> None:
    checkpoints = Checkpoints(folder, background=False)
    at.ready()
    checkpoints.save(1, *_model(16), {"tokens": 1})


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def gone(file: Path) -> None:
    file.unlink()


def changed(file: Path) -> None:
    """One byte in the middle of the largest tensor."""
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    file.write_bytes(whole)


def _row(moment: str, fault: str, said: list[Said], folder: str) -> dict[str, Any]:
    start = time.monotonic()
    again, _ = job.run(partial(read, folder=folder, rows=16), "none", size=2)
    sound = all(s.error == "nothing raised" for s in again)
    restart = f"{time.monotonic() - start:.1f} s, from the one before" if sound else str([s.message for s in again])
    lived = [s._asdict() for s in said if fault != "kill -9" or s.rank != VICTIM]
    return {"moment": moment, "fault": fault, "said": lived, "restart": restart, "left behind": []}


class disk:
    """A folder of its own: a file system of this size where one may be mounted, else a plain folder."""

    def __init__(self, size: str) -> None:
        self.size = size

    def __enter__(self) -> str:
        self.folder = tempfile.mkdtemp(prefix="ring_la-disk-")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", self.folder]
        self.mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        return self.folder

    def __exit__(self, *error: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=True)
        shutil.rmtree(self.folder)
