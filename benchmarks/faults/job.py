"""Ranks of one job as processes of their own, and a fault that comes to one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_la.testing.processes import ON_ONE_GPU, free_port

VICTIM = 1
TIMEOUT = 6.0
"""Seconds that a ContextParallel of these jobs waits for a peer."""
PATIENCE = 60.0
"""Seconds after which a rank that said nothing counts as hanging."""


class Said(NamedTuple):
    """What a rank that lived on said: the error, its first line, seconds since the fault."""

    rank: int
    error: str
    message: str
    seconds: float


class Rank(NamedTuple):
    """A rank, as what it runs sees it: `ready` says that it has come to where the fault comes, and waits for it."""

    rank: int
    size: int
    device: torch.device
    ready: Callable[[], str]


def run(moment: Callable[[Rank], Any], fault: str, size: int = 3, port: int = 0) -> tuple[list[Said], int]:
    """Start ranks, let `fault` come to the victim at their `ready`, and hear what the others say; also their port.

    fault: "kill -9", "SIGSTOP", or a word that `ready` returns on the victim, which then does what it says.
    """
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    port = port or free_port()
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["benchmarks.faults.moments", "benchmarks.faults.disks"])
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, port, there, moment), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for rank, pipe in enumerate(pipes):
            said = pipe.recv() if pipe.poll(120) else "nothing in 120 s"
            if said != "ready":
                raise RuntimeError(f"rank {rank} is not ready: {said}")
        victim = processes[VICTIM].pid
        if fault in SIGNALS:
            os.kill(victim, SIGNALS[fault])
        start = time.monotonic()
        for rank, pipe in enumerate(pipes):
            if not (rank == VICTIM and fault in SIGNALS):
                pipe.send(fault if rank == VICTIM else "go")
        others = [r for r in range(size) if r != VICTIM or fault in ("other shapes", "none")]
        return [_hear(r, pipes[r], start) for r in others], port
    finally:
        for process in processes:
            process.kill()
            process.join()


SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def _hear(rank: int, pipe: Any, start: float) -> Said:
    left = max(0.0, start + PATIENCE - time.monotonic())
    try:
        if not pipe.poll(left):
            return Said(rank, "hangs", f"nothing in {PATIENCE:.0f} s", PATIENCE)
        error, message, when = pipe.recv()
    except EOFError:
        return Said(rank, "the process ended", "", time.monotonic() - start)
    return Said(rank, error, message, when - start)


def _serve(rank: int, size: int, port: int, pipe: Any, moment: Callable[[Rank], Any]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        if gpus < size:
            os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"rank {rank}")

    def ready() -> str:
        pipe.send("ready")
        return pipe.recv()

    try:
        dist.init_process_group(
            "nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
            timeout=timedelta(seconds=PATIENCE), device_id=device if gpus else None,
        )  # fmt: skip
        moment(Rank(rank, size, device, ready))
        pipe.send(("nothing raised", "", time.monotonic()))
    except BaseException as error:
        trace = traceback.format_exc() if type(error).__module__.startswith("builtins") else ""
        pipe.send((type(error).__name__, (str(error) or trace).strip().splitlines()[0], time.monotonic()))
