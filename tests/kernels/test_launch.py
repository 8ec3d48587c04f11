"""Launching compiled kernels, with stubs for what Triton compiles: no GPU and no compiler."""

from __future__ import annotations

import types

import pytest
import torch

triton = pytest.importorskip("triton")

from ring_la.kernels.runtime import launch as launching  # noqa: E402


class Stub(triton.JITFunction):
    """A kernel that is compiled for each class of arguments it is first called with, and notes who launched it."""

    def __init__(self, name: str, unspecialised: tuple[str, ...] = ("n",)) -> None:
        self.__name__ = name
        self.do_not_specialize = unspecialised
        self.arg_names = ["x", "n", "BLOCK"]
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def __hash__(self) -> int:
        raise AssertionError("Triton's hash reads the source of a kernel")

    def __getitem__(self, grid):
        def start(*args, **constants):
            self.compiled.append(args)
            return types.SimpleNamespace(
                run=lambda *frame: self.launched.append(frame), function=1, packed_metadata="metadata"
            )

        return start


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(launching, "current_stream", lambda index: 7)


def test_kernels_of_one_name_are_told_apart():
    x, (one, other) = torch.zeros(8), (Stub("same"), Stub("same"))
    for _ in range(2):
        launching.launch(one, (1,), x, 3, BLOCK=4)
        launching.launch(other, (1,), x, 3, BLOCK=4)
    assert (len(one.compiled), len(other.compiled)) == (1, 1)
    assert (len(one.launched), len(other.launched)) == (1, 1)
