"""Stand-ins of CUDA's graphs, by which `ring_la.capture` does on a CPU all that it does around them."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ring_la.capturing import CapturedStep


class Stand:
    """Streams and graphs of a device that there is none of."""

    def __init__(self, device: torch.device) -> None:
        self.strict = False

    @staticmethod
    def capturing() -> bool:
        return False

    def run(self, call, strict):
        return call()

    def end(self):
        return SimpleNamespace(query=lambda: True)

    def ends(self):
        return [self.end()]

    def write(self, call):
        return SimpleNamespace(replay=lambda: None, reset=lambda: None), call()


class Repeating(Stand):
    """A stand-in whose replays do the step again, into what it returned the first time."""

    def write(self, call):
        out, replays = call(), []

        def replay():
            if replays:
                for mine, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(call()), strict=True):
                    mine.copy_(new)
            replays.append(1)

        return SimpleNamespace(replay=replay, reset=lambda: None), out


READS = (
    ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount"),
    ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"),
)
"""Operators, and functions of PyTorch, for which the host waits for the device."""
GIVES = ("tensor", "as_tensor", "new_tensor", "__getitem__", "__setitem__")
"""Functions by which it brings the device numbers in a list; of the first two where they are asked for there."""


class Apart(TorchFunctionMode):
    """What runs within leaves the host and the device alone with theirs: on a GPU nothing in it waits. A tensor that is
    made for the host, by the word "cpu", would be brought to the device later."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        gives = name in GIVES
        if name in GIVES[:2]:
            gives = kwargs.get("device") is not None
        elif name in GIVES[3:]:
            gives = any(isinstance(x, list) for x in (args[1] if isinstance(args[1], tuple) else args[1:2]))
        if name in READS[1] or gives or kwargs.get("device") == "cpu":
            raise RuntimeError(f"{name}: the host would wait for the device")
        return function(*args, **kwargs)


class Recorded(Stand):
    """A stand-in whose graphs are operators and the memory they had, as CUDA's are: no Python runs in a replay, numbers
    stay as they were, results come where they came first, and what nobody keeps is read no more."""

    def write(self, call):
        tape = Tape()
        with Apart(), tape:
            out = call()
        tape.refuse_forgotten()
        return SimpleNamespace(replay=tape.replay, reset=tape.reset), out


class Tape(TorchDispatchMode):
    """Operators as they are called, to be called again."""

    def __init__(self):
        super().__init__()
        self._calls, self._own, self._replays = [], set(), 0
        self._others = []  # memory that was there before, each use of it as a tensor that nobody else has

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, op.overloadpacket.__name__
        given = tensors((args, kwargs))
        if name in READS[0] or (name.startswith("index") and any(x.dtype == torch.bool for x in given[1:])):
            raise RuntimeError(f"{name} within a graph: the host would wait for the device")
        out, there = op(*args, **kwargs), {address(x) for x in given}
        made = {address(x) for x in tensors(out)} - there
        self._own |= made
        if made or op._schema.is_mutable or op.namespace == "c10d":  # else a view
            self._calls.append((op, *pytree.tree_map(self._held, (args, kwargs, out))))
        return out

    def _held(self, x):
        """What the graph keeps of an argument or a result: of others' memory nothing but where it is."""
        if not isinstance(x, torch.Tensor) or address(x) in self._own:
            return x
        place = x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        self._others.append(place)
        return place

    def refuse_forgotten(self):
        """Behind the capture: others' memory that is gone by the time of a replay."""
        uses = Counter(map(address, self._others))
        for x in self._others:
            storage = x.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= uses[address(x)] + 1:
                raise RuntimeError(f"a graph reads {list(x.shape)} numbers that nobody keeps")

    def replay(self):
        self._replays += 1
        self.refuse_forgotten()
        for op, args, kwargs, out in self._calls if self._replays > 1 else ():  # the capture has done it once
            with torch.no_grad():
                again = op(*args, **kwargs)
                for mine, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(new, torch.ScriptObject):
                        new.wait()  # a message
                    elif isinstance(new, torch.Tensor) and address(new) != address(mine):
                        mine.copy_(new)

    def reset(self):
        self._calls, self._others = [], []


def tensors(x):
    return [y for y in pytree.tree_leaves(x) if isinstance(y, torch.Tensor)]


def address(x):
    return x.untyped_storage().data_ptr() or id(x)


def standing(put, kind=Stand) -> None:
    put(sys.modules[CapturedStep.__module__], "StepStream", kind)
    put(CapturedStep, "_device", lambda self, tensors: torch.device("cpu"))
