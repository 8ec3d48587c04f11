"""Stand-ins of CUDA's graphs, by which `ring_la.capture` does on a CPU all that it does around them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree

from ring_la.capture import CapturedStep


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


def standing(put, kind=Stand) -> None:
    put(sys.modules[CapturedStep.__module__], "StepStream", kind)
    put(CapturedStep, "_device", lambda self, tensors: torch.device("cpu"))
