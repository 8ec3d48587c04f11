"""Memory of a reader's rank that workers of vLLM on other hosts read, by NIXL: RDMA where UCX finds it, else TCP.

A rank registers what it has laid down and says where that is and how it is reached; a worker reads it into memory of
its own. Of NIXL only what is plain bytes and numbers travels, in the reader's JSON; its pickled lists are not used. Who
can ask the reader and reach its hosts can read, and write, that memory: a network of one's own.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
import uuid
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from .asking import ReaderError
from .memory import mapped

LOOK = 0.001
"""Seconds between two looks whether all is there."""


def agent(name: str) -> Any:
    """One of NIXL's ends, over UCX.

    Raises:
        UnsupportedError: NIXL is not installed.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        hint = "pip install 'ring_la[nixl]'"
        raise UnsupportedError("hosts", "an environment with NIXL", f"none ({error})", hint) from error
    return nixl_agent(f"{name}-{uuid.uuid4()}", nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))


class Registered:
    """As `memory.Shared`: memory of this rank, that other hosts read.

    Args:
        device: where it is.

    Raises:
        UnsupportedError: NIXL is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._agent = device, agent("ring-la-reader")
        self._held: dict[int, tuple[Tensor, Any]] = {}

    @property
    def held(self) -> int:
        """Bytes that are registered now."""
        return sum(memory.nbytes for memory, _ in self._held.values())

    def room(self, key: int, size: int) -> tuple[Tensor, dict[str, Any]]:
        """`size` bytes under a number, uint8, and the handle others read them by."""
        memory = torch.empty(max(1, size), dtype=torch.uint8, device=self.device)
        where, kind = _place(memory)
        self._held[key] = memory, self._agent.register_memory([(*where, "")], kind)
        told = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return memory, {"nixl": told, "kind": kind, "place": list(where), "size": memory.nbytes}

    def drop(self, key: int) -> None:
        """Give the memory under a number back."""
        if key in self._held:
            self._agent.deregister_memory(self._held.pop(key)[1])

    def close(self) -> None:
        """Give everything back."""
        for key in list(self._held):
            self.drop(key)


class Remote:
    """On a worker of vLLM: memory of readers, wherever they are. Any thread may call; one reads at a time.

    Args:
        patience: seconds after which what does not come is given up.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._agent = patience, None
        self._lock = threading.Lock()

    def read(self, handle: dict[str, Any], device: torch.device) -> Tensor:
        """A reader's memory as uint8 on this device: a view of it on the same host, else a copy.

        Raises:
            ArgumentError: no handle. UnsupportedError: it cannot be reached from here. ReaderError: it did not come.
        """
        if "nixl" not in handle:
            return mapped(handle, device)
        told, kind, place = _checked(handle)
        with self._lock:
            if self._agent is None:
                self._agent = agent("ring-la-vllm")
            try:
                return self._read(told, kind, place, device)
            except ReaderError:
                raise
            except Exception as error:  # NIXL has one of its own for each thing that goes wrong
                raise ReaderError(f"the reader's memory did not come ({type(error).__name__}: {error})") from error

    def _read(self, told: bytes, kind: str, place: tuple[int, int, int], device: torch.device) -> Tensor:
        nixl: Any = self._agent
        memory = torch.empty(place[1], dtype=torch.uint8, device=device)
        if memory.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # what had that memory before is done with it
        mine, my_kind = _place(memory)
        name = nixl.add_remote_agent(told)
        name = name.decode() if isinstance(name, bytes) else name
        registered = nixl.register_memory([(*mine, "")], my_kind)
        try:
            ends = nixl.get_xfer_descs([mine], my_kind), nixl.get_xfer_descs([place], kind)
            transfer = nixl.initialize_xfer("READ", *ends, name)
            try:
                self._finish(transfer)
            finally:
                nixl.release_xfer_handle(transfer)
        finally:
            nixl.deregister_memory(registered)
            nixl.remove_remote_agent(name)
        return memory

    def _finish(self, transfer: Any) -> None:
        nixl: Any = self._agent
        state, until = nixl.transfer(transfer), time.monotonic() + self._patience
        while state == "PROC" and time.monotonic() < until:
            time.sleep(LOOK)
            state = nixl.check_xfer_state(transfer)
        if state != "DONE":
            late = f"not in {self._patience:g} s" if state == "PROC" else state
            raise ReaderError(f"the reader's memory did not come ({late})")


def _place(memory: Tensor) -> tuple[tuple[int, int, int], str]:
    """Address, bytes and number of the device, and NIXL's name of the kind."""
    where = (memory.data_ptr(), memory.nbytes, memory.device.index or 0)
    return where, "VRAM" if memory.is_cuda else "DRAM"


def _checked(handle: dict[str, Any]) -> tuple[bytes, str, tuple[int, int, int]]:
    try:
        told, kind = base64.b64decode(handle["nixl"], validate=True), handle["kind"]
        address, size, number = map(int, handle["place"])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ArgumentError("memory", "a handle of NIXL's with kind and place", repr(handle)) from error
    if kind not in ("DRAM", "VRAM") or size < 1 or size != handle.get("size"):
        raise ArgumentError("memory", "DRAM or VRAM of a size", repr(handle))
    return told, kind, (address, size, number)
