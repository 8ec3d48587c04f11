"""Joining the job that torchrun started, or a job of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Within it torch.distributed is there: NCCL and this rank's GPU, or gloo and one thread a rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend, device = "nccl", torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
        backend, device = "gloo", None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_ranks(timeout: float) -> dist.ProcessGroup | None:
    """The job's ranks in a group whose messages end by themselves after so many seconds. Collective.

    A process waits for gloo's messages when it ends, for one to a rank that is stopped as long as the group allows:
    half an hour in the group that torch.distributed begins with. That one is right under NCCL (None).
    """
    if dist.get_backend() != "gloo":
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))  # an int on ranks outside
    return group
