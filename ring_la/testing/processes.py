"""Ranks as processes of their own: started once for many calls, killed when one of them hangs or dies."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, PeerError
from .rank import RankAnswer

START = 120.0
"""Seconds in which all ranks have joined."""
AFTER_AN_ERROR = 10.0
"""Seconds in which the other ranks answer, once one of them has raised: they may wait for it."""
ON_ONE_GPU = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""What ranks that share a GPU need: NCCL takes each for a host of its own, and memory is mapped by its own device."""


class Processes:
    """`size` ranks of one job: gloo on CPUs, or NCCL with a GPU each or all on one. A context manager.

    The processes are spawned, so a script that uses them needs the guard ``if __name__ == "__main__":``.

    Args:
        size: number of ranks. device: "cpu"; "cuda", a GPU a rank; or "cuda:0", all on that one, where NCCL's messages
            go by sockets: as right, and slow. timeout: seconds one call may take.
    """

    def __init__(self, size: int, device: str = "cpu", timeout: float = 60.0) -> None:
        gpus = torch.cuda.device_count()
        known = ["cpu", "cuda", *(f"cuda:{i}" for i in range(gpus))]
        if device not in known:
            raise ArgumentError("device", f"one of {', '.join(known)}", repr(device))
        if device == "cuda" and gpus < size:
            hint = 'With device="cuda:0" ranks share a GPU' if gpus else ""
            raise ArgumentError("size", f"at most {gpus}, the number of GPUs", size, hint)
        if multiprocessing.parent_process() is not None:
            hint = 'Put what a script runs under `if __name__ == "__main__":`'
            raise ArgumentError("judge", "a call outside the ranks it starts", "one within", hint)
        self.size, self.device, self.timeout = size, device, timeout
        self._processes: list = []
        self._pipes: list = []
        self._stacks: list[str] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self, task: Callable[..., RankAnswer], *args: Any) -> list[RankAnswer]:
        """What ``task(rank, group, device, *args)`` answers on each rank. Starts the processes where none run.

        Raises:
            PeerError: the ranks could not be started, with each one's error.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((task, args))
        answers = self._collect(self.timeout)
        if any((a.error and not a.refused) or a.silent for a in answers):
            self.stop()  # messages of some ranks may be under way
        return answers

    def stop(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for path in self._stacks:
            os.unlink(path)
        self._processes, self._pipes, self._stacks = [], [], []

    def _start(self) -> None:
        spawn, port = multiprocessing.get_context("spawn"), free_port()
        for rank in range(self.size):
            here, there = spawn.Pipe()
            handle, stack = tempfile.mkstemp(prefix="ring_la-rank-")
            os.close(handle)
            arguments = (rank, self.size, port, self.device, there, stack)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._stacks.append(stack)
        failed = [f"rank {r}: {a.error}" for r, a in enumerate(self._collect(START)) if a.error or a.silent]
        if failed:
            self.stop()
            raise PeerError("the ranks could not be started:\n  " + "\n  ".join(failed))

    def _collect(self, timeout: float) -> list[RankAnswer]:
        """Each rank's answer; of those that do not answer, where they stand."""
        answers: dict[int, RankAnswer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in answers}
            pipe: Any
            for pipe in multiprocessing.connection.wait(list(waiting), deadline - time.monotonic()):
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    answers[rank] = RankAnswer(error=f"the process died (exit code {code})", silent=True)
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR)
        for rank in range(self.size):
            if rank not in answers:
                answers[rank] = RankAnswer(error="no answer in time", trace=self._stack(rank), silent=True)
        return [answers[r] for r in range(self.size)]

    def _stack(self, rank: int) -> str:
        """Where a rank that does not answer stands."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while not os.path.getsize(self._stacks[rank]) and time.monotonic() < deadline:
            time.sleep(0.05)
        with open(self._stacks[rank]) as file:
            return file.read()


def free_port() -> int:
    """A port of this host that nobody has, as far as is known."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, size: int, port: int, kind: str, pipe: Any, stack: str) -> None:
    """One rank: join, then answer until the pipe closes."""
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            group, device = _join(rank, size, port, kind)
        except Exception as error:
            pipe.send(RankAnswer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
            return
        pipe.send(RankAnswer())
        while True:
            try:
                task, args = pipe.recv()
            except EOFError:
                return
            except Exception as error:  # what is judged cannot be imported here
                pipe.send(RankAnswer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
                continue
            pipe.send(task(rank, group, device, *args))


def _join(rank: int, size: int, port: int, kind: str) -> tuple[Any, torch.device]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    device = torch.device("cpu")
    if kind != "cpu":
        shared = torch.device(kind).index
        if shared is not None:
            os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"rank {rank}", LOCAL_RANK=str(shared))
        device = torch.device("cuda", rank if shared is None else shared)
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=address, rank=rank, world_size=size,
        timeout=timedelta(seconds=START), device_id=None if kind == "cpu" else device,
    )  # fmt: skip
    return dist.group.WORLD, device
