"""How a rank starts and how it is told to end: the process group, where the seconds go, SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Start:
    """Where the seconds before the first step go, from `began` on (a time; default: when this process started)."""

    def __init__(self, began: float | None = None) -> None:
        self.began = self.at = time.time() - age() if began is None else began
        self.parts: dict[str, float] = {}

    def part(self, name: str) -> None:
        """What was done since the part before."""
        now = time.time()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.at
        self.at = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05)
        return f"ready after {self.at - self.began:.1f} s: {parts}"


def age() -> float:
    """Seconds since this process was started, on Linux; 0 elsewhere."""
    if not hasattr(time, "CLOCK_BOOTTIME") or not Path("/proc/self/stat").exists():
        return 0.0
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def join(timeout: timedelta) -> torch.device:
    """This rank's device: its GPU with NCCL, else the CPU with gloo and a share of the cores."""
    local, store = int(os.environ.get("LOCAL_RANK", 0)), fresh_store()
    ranks: dict[str, Any] = {"timeout": timeout}
    if store is not None:
        ranks |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    elif "RANK" not in os.environ:  # not started by torchrun
        ranks |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **ranks)
        return device
    dist.init_process_group("gloo", **ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return torch.device("cpu")


def fresh_store() -> dist.Store | None:
    """The store of torchrun on one node, without what an earlier start of the ranks left there; None elsewhere.

    torchrun keeps one store through all restarts (pytorch/pytorch#135712), and ranks would take the addresses of dead
    ones for their peers'. On several nodes restarts are not counted alike: launch/ sets
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there.
    """
    env = os.environ.get
    if env("TORCHELASTIC_USE_AGENT_STORE") != "True" or env("GROUP_WORLD_SIZE") != "1":
        return None
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]))
    return dist.PrefixStore(f"start-{env('TORCHELASTIC_RESTART_COUNT')}", dist.TCPStore(*where, is_master=False))


class Terminated:
    """SIGTERM as a wish: schedulers and torchrun send it before they kill, so the step under way may end.

    torchrun kills 30 seconds later, or after its --shutdown-timeout. Where this is not the main thread, signals are not
    ours.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Terminated:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
