"""How many bytes tensors hold at once, counted as they are made and freed: memory on a device without a counter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts memory that operators allocate under it, without what they free before they return.

    Attributes:
        most: bytes held at once, at most, of tensors made under it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._others: dict[int, StorageWeakRef] = {}  # which also keep their addresses from being given again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        held = self.now
        for storage in _storages((args, kwargs)):
            if storage._cdata not in held:
                self._others[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in self._others:
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.bytes)
        return out

    @property
    def now(self) -> dict[int, tuple[StorageWeakRef, int]]:
        """What is held, by the address of its storage."""
        self._held = {k: (ref, n) for k, (ref, n) in self._held.items() if not ref.expired()}
        return self._held

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return sum(n for _, n in self.now.values())


def _storages(tree) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)]


def peak(step) -> tuple[object, int, int]:
    """The result of `step()`, the most bytes held at once while it ran, and those held after it."""
    with torch.autograd.set_multithreading_enabled(False), PeakBytes() as counted:
        out = step()
    return out, counted.most, counted.bytes
