"""A pool of ranks that lives as long as the test run: real processes, one start-up for all tests.

    ranks.run(4, check, *args)      calls check(rank, *args) on ranks 0..3 and returns their results

`check` is an importable function of a test module. Each size P has its own process group over ranks 0..P−1, which
`check` gets from `group()`. A rank's exception is raised in the test with that rank's traceback; a rank that does not
answer within the timeout says where it stands and is killed with all others, and the next call starts a fresh pool, as
it does where ranks that disagreed have left messages in the group.
Ranks speak gloo on CPUs, or NCCL with a GPU each; more ranks than GPUs share them, and NCCL's messages go by sockets.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import tests.support.without_fla  # noqa: F401

SIZE = 4
HANG = 90.0
"""Seconds one call may take."""
AFTER_AN_ERROR = 15.0
"""Seconds that ranks have left when one has failed, for which they may wait."""
OFTEN = ("torch.distributed", "ring_la.nn", "ring_la.models", "ring_la.training", "ring_la.serving.engine",
         "ring_la.integrations.transformers", "ring_la.integrations.diffusers", "torch._dynamo", "diffusers",
         "transformers.modeling_utils")  # fmt: skip
"""What ranks import, each for itself unless the process they are forked from has: of it, what a run's tests import."""

_groups: dict[int, Any] = {}
_size = 0


def group(size: int | None = None) -> Any:
    """In a rank: the process group over ranks 0 … size−1 (default: the ranks of the current call)."""
    return _groups[_size if size is None else size]


class RankError(AssertionError):
    """A rank failed; the message holds the traceback of each rank that did."""


class Ranks:
    """Processes 0 … size−1 joined in one job of gloo or NCCL, fed over pipes. environment: variables of theirs."""

    def __init__(self, size: int = SIZE, backend: str = "gloo", environment: Mapping[str, str] | None = None) -> None:
        self.size, self.backend, self.environment = size, backend, dict(environment or {})
        self._processes: list = []
        self._pipes: list = []

    def start(self) -> None:
        from ring_la.testing.processes import free_port

        server = multiprocessing.get_context("spawn" if self.backend == "nccl" else "forkserver")
        if self.backend == "gloo":  # imports once for all ranks and restarts; CUDA does not survive a fork
            server.set_forkserver_preload([__name__, *(name for name in OFTEN if name in sys.modules)])
        port = free_port()
        for rank in range(self.size):
            here, there = server.Pipe()
            args = (rank, self.size, port, there, self.backend, self.environment)
            process = server.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._collect(range(self.size), HANG)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            _stacks(process.pid).unlink(missing_ok=True)
        self._processes, self._pipes = [], []

    def run(
        self, size: int, check: Callable, *args: Any, timeout: float = HANG, dying: Sequence[int] = ()
    ) -> list[Any]:
        """The results of ``check(rank, *args)`` on ranks 0 … size−1, without those that die in it."""
        if not self._processes:
            self.start()
        message = pickle.dumps((check.__module__, check.__qualname__, size, args))
        for rank in range(size):
            self._pipes[rank].send_bytes(message)
        results = self._collect([r for r in range(size) if r not in dying], timeout)
        if dying:
            self.stop()
        return results

    def _where(self, ranks: Sequence[int]) -> dict[int, str]:
        """The stacks of ranks that do not answer."""
        found = {}
        for rank in ranks:
            stacks = _stacks(self._processes[rank].pid)
            if stacks.exists() and self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
                deadline = time.monotonic() + 5  # a machine under load
                while not found.get(rank) and time.monotonic() < deadline:
                    time.sleep(0.5)
                    found[rank] = stacks.read_text()
        return found

    def _collect(self, ranks: Sequence[int], timeout: float) -> list[Any]:
        results, errors, deadline = {}, {}, time.monotonic() + timeout
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting:
            left = deadline - time.monotonic()
            if errors:
                left = min(left, AFTER_AN_ERROR)
            answers: list[Any] = multiprocessing.connection.wait(list(waiting), max(0.0, left))
            if not answers:
                missing = sorted(waiting.values())
                where = self._where(missing)
                self.stop()
                waited = f"within {AFTER_AN_ERROR:.0f} s of the others" if errors else f"within {timeout:.0f} s"
                text = _report(errors) + f"no answer from ranks {missing} {waited}"
                raise RankError(text + _report(where))
            for pipe in answers:
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else errors)[waiting.pop(pipe)] = value
        if errors or any(spoiled for _, spoiled in results.values()):
            self.stop()  # half-finished exchanges may be left in the groups
        if errors:
            raise RankError(_report(errors))
        return [results[rank][0] for rank in ranks]


def _report(errors: dict[int, str]) -> str:
    return "".join(f"\n--- rank {rank} ---\n{text}\n" for rank, text in sorted(errors.items()))


def _stacks(pid: int) -> Path:
    """Where a rank writes its stacks on SIGUSR1."""
    return Path(tempfile.gettempdir()) / f"ring_la-rank-{pid}.txt"


def _spoiled() -> bool:
    """Whether messages that nobody expects are left in this call's process group."""
    from ring_la.comm.members import Members

    return Members(group(), timedelta(seconds=1)).spoiled != ""


def _serve(rank: int, size: int, port: int, pipe: Any, backend: str, environment: dict[str, str]) -> None:
    """One rank: join, then answer calls until the pipe closes."""
    global _size
    os.environ |= environment
    gc.freeze()  # what is imported is no garbage
    gc.set_threshold(10_000, 10, 10)
    faulthandler.register(signal.SIGUSR1, file=_stacks(os.getpid()).open("w"))  # open as long as the process lives
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = None
    if backend == "nccl":  # whose first calls wait for each other's compilers; `HANG` still holds
        gpus = torch.cuda.device_count()
        if size > gpus:
            from ring_la.testing.processes import ON_ONE_GPU

            os.environ |= ON_ONE_GPU | {"NCCL_HOSTID": f"rank {rank}"}
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device,
        timeout=timedelta(seconds=60 if device is None else 600),
    )  # fmt: skip
    for p in range(1, size + 1):
        _groups[p] = dist.new_group(list(range(p)))
    pipe.send((True, (None, False)))
    while True:
        try:
            module, name, _size, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send((True, (function(rank, *args), _spoiled())))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
