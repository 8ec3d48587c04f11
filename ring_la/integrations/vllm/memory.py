"""Memory that a rank of the reader lays tensors into and vLLM's workers map: one host's.

On CPUs it is a file in a folder that lives in memory (/dev/shm): each process of the reader has a folder of its own,
which it holds by a lock and removes at its end; what a killed one leaves, the next reader removes. On GPUs it is the
rank's own memory, reached by CUDA's interprocess handles.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm.sharing import read, written
from ...errors import ArgumentError, UnsupportedError

PREFIX = "ring-la-reader-"
PARENT = Path("/dev/shm")
"""Where folders of memory are, on Linux."""


class Shared:
    """Memory of this rank that others on this host can map.

    Args:
        device: where it is. parent: the folder in which files of CPU memory are; None: /dev/shm, or the usual temporary
            one.
    """

    def __init__(self, device: torch.device, parent: Path | None = None) -> None:
        self.device, self._held = device, dict[int, Tensor]()
        self._shares: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._folder: Path | None = None
        if device.type == "cpu":
            parent = parent or (PARENT if PARENT.is_dir() else Path(tempfile.gettempdir()))
            sweep(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # nobody else's: mode 0700
            self._lock = (self._folder / "new").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self._folder / "new").rename(self._folder / "lock")  # `sweep` of another rank never sees it unlocked

    @property
    def held(self) -> int:
        """Bytes that are shared now."""
        return sum(memory.nbytes for memory in self._held.values())

    def room(self, key: int, size: int) -> tuple[Tensor, dict[str, Any]]:
        """`size` bytes under a number, uint8, and the handle others map them by.

        Raises:
            OSError: there is no room for them.
        """
        size = max(1, size)
        if self._folder is None:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._shares[key] = _reduced(memory)
            handle: dict[str, Any] = {"cuda": written(self._shares[key][1]), "size": size}
        else:
            path = self._folder / str(key)
            with path.open("wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)  # now, and not by a bus error when it is written
                except OSError:
                    path.unlink()
                    raise
            memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            handle = {"file": str(path), "size": size}
        self._held[key] = memory
        return memory, handle

    def drop(self, key: int) -> None:
        """Give the memory under a number back; who has it mapped on a CPU may go on."""
        if self._held.pop(key, None) is None:
            return
        if self._folder is not None:
            (self._folder / str(key)).unlink()
        else:  # PyTorch keeps what is shared until somebody has had it, who may never have come
            rebuild, arguments = self._shares.pop(key)
            said = dict(zip(inspect.signature(rebuild).parameters, arguments))
            where = said["ref_counter_handle"], said["ref_counter_offset"]
            torch.UntypedStorage._release_ipc_counter(*where, device=self.device)

    def close(self) -> None:
        """Give everything back."""
        for key in list(self._held):
            self.drop(key)
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._lock.close()
            self._folder = None


def sweep(parent: Path) -> None:
    """Remove folders of readers that are gone: nobody holds their lock."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = folder / "lock"
        try:
            if folder.stat().st_uid != os.getuid() or not lock.is_file():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):  # it is held; another reader was faster
            continue


def mapped(handle: dict[str, Any], device: torch.device) -> Tensor:
    """A reader's memory, seen from here: uint8, to be read only.

    Args:
        device: a GPU that reaches that memory; of no account for memory of a CPU.

    Raises:
        ArgumentError: no handle. UnsupportedError: the memory cannot be reached from here.
    """
    here = "Reader and vLLM must run on one host, and in containers share /dev/shm or the GPUs"
    size = handle.get("size")
    if not isinstance(size, int) or size < 1 or not ({"file", "cuda"} & handle.keys()):
        raise ArgumentError("memory", "a handle with a size, and a file or CUDA's", repr(handle))
    if "file" in handle:
        path = Path(handle["file"])
        if not path.is_file() or path.stat().st_size != size:
            raise UnsupportedError("reader", "memory that this process can map", f"{path} ({size} bytes)", here)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    if device.type != "cuda":
        raise UnsupportedError("reader", "one on CPUs for vLLM on a CPU", "one on GPUs", here)
    rebuild, own = _reduced(torch.empty(1, dtype=torch.uint8, device=device))
    names = list(inspect.signature(rebuild).parameters)
    theirs = dict(zip(names, read(handle["cuda"], own))) | {"storage_device": device.index or 0}
    try:
        return rebuild(**theirs | {"event_sync_required": False})
    except RuntimeError as error:
        got = f"a GPU's that is out of reach ({str(error).splitlines()[0]})"
        raise UnsupportedError("reader", "memory that this process can map", got, here) from error


def _reduced(memory: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """What rebuilds a tensor of a GPU in another process, and its arguments."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize(memory.device)
    return reduce_tensor(memory)
