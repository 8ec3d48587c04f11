"""Launching compiled kernels, with stubs for what Triton compiles: no GPU and no compiler."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from tests.support.interpreter import interpreted

interpreted()  # here it would do to compile, but not for the files after this one
triton = pytest.importorskip("triton")

from ring_la.kernels.fused import cross_entropy_kernel  # noqa: E402
from ring_la.kernels.runtime import contract  # noqa: E402
from ring_la.kernels.runtime import launch as launching  # noqa: E402
from ring_la.kernels.runtime.triton_version import FIRST, STREAM, class_of  # noqa: E402
from ring_la.kernels.wy.gdn_launches import span  # noqa: E402


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
    monkeypatch.setattr(contract, "checking", False)


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(contract, "checking", True)


def test_kernels_of_one_name_are_told_apart():
    x, (one, other) = torch.zeros(8), (Stub("same"), Stub("same"))
    for _ in range(2):
        launching.launch(one, (1,), x, 3, BLOCK=4)
        launching.launch(other, (1,), x, 3, BLOCK=4)
    assert (len(one.compiled), len(other.compiled)) == (1, 1)
    assert (len(one.launched), len(other.launched)) == (1, 1)


def test_a_kernel_is_compiled_for_each_class_of_arguments():
    """Lengths compile nothing anew unless they need more bits; boundaries, constants and specialised sizes do."""
    memory, kernel, open_kernel = torch.zeros(64), Stub("kernel"), Stub("open", unspecialised=())
    for x, n, block in ((memory, 3, 4), (memory, 16, 4), (memory, 1, 4), (memory[4:], 7, 4)):
        launching.launch(kernel, (1,), x, n, BLOCK=block)
    assert len(kernel.compiled) == 1
    for x, n, block in ((memory, 1 << 31, 4), (memory[1:], 3, 4), (memory.half(), 3, 4), (memory, 3, 8)):
        for _ in range(2):
            launching.launch(kernel, (1,), x, n, BLOCK=block, tensors="any")
    assert len(kernel.compiled) == 5
    for n in (1, 16, 32, 3, 5):
        launching.launch(open_kernel, (1,), memory, n, BLOCK=4, tensors="any")
    assert len(open_kernel.compiled) == 3
    grid, stream, own = kernel.launched[0][:3], kernel.launched[0][STREAM], kernel.launched[0][FIRST:]
    assert (grid, stream, own) == ((1, 1, 1), 7, (memory.data_ptr(), 16, 4))


@pytest.mark.parametrize("unspecialised", [True, False])
def test_classes_are_at_least_as_fine_as_tritons(unspecialised):
    """Arguments that Triton would compile apart are of two classes."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    memory = torch.zeros(64)
    args = [memory, memory[1:], memory.half(), None, 0.5, 1.0, True, 0, 1, 5, 16, -16, 2**31 - 1, 2**31, -(2**31) - 1,
            (memory, 5), (memory, 16), (memory[1:], 5), ((1, 2), 3), ((4, 2), 3)]  # fmt: skip
    ours = [class_of(x, unspecialised) for x in args]
    theirs = [libtriton.native_specialize_impl(backend, x, False, not unspecialised, not unspecialised) for x in args]
    for i, j in itertools.combinations(range(len(args)), 2):
        assert ours[i] != ours[j] or theirs[i] == theirs[j], (args[i], args[j])


BROKEN = {
    "off a boundary": (torch.zeros(64)[1:], 3, "contiguous", "kernel: argument x: .* boundary of 16 bytes, got one 4"),
    "strided": (torch.zeros(8, 8)[:, :4], 3, "contiguous", "kernel: argument x: expected a contiguous tensor, got"),
    "off, strided": (torch.zeros(8, 8)[:, 1:], 3, "strided", "kernel: argument x: .* boundary of 16 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_names_kernel_and_argument(checked, name):
    x, n, promise, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        launching.launch(Stub("kernel"), (1,), x, n, BLOCK=4, tensors=promise)


def test_interpreted_launches_are_checked_too(checked):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    logits = torch.randn(33)[1:].view(4, 8)
    with pytest.raises(AssertionError, match=r"cross_entropy_kernel: argument logits: .*boundary of 16 bytes"):
        cross_entropy_kernel.forward(logits, torch.zeros(4, dtype=torch.int64), -100, True)


def test_a_size_that_is_specialised_breaks_the_promise(checked):
    with pytest.raises(AssertionError, match="open: argument n: expected a size in do_not_specialize, got 3"):
        launching.launch(Stub("open", unspecialised=()), (1,), torch.zeros(8), 3, BLOCK=4)


def test_what_keeps_its_promise_passes(checked):
    kernel = Stub("kernel")
    launching.launch(kernel, (1,), torch.zeros(8, 8)[:, :4], 3, BLOCK=4, tensors="strided")
    launching.launch(kernel, (1,), torch.zeros(64)[1:], 3, BLOCK=4, tensors="any")
    assert len(kernel.compiled) == 2


def test_spans_of_a_delta_rule_are_cut_by_cost():
    """Of 132 programs some idle rather than go over tokens three times; two pieces may be unequal."""
    assert span(32768, 16, 8, 132) == 4096
    assert span(2048, 16, 1, 132) == 256
    assert span(2048, 32, 1, 132) == 512
    assert span(32768, 8, 1, 132) == 1024
    assert span(32768, 64, 2, 132) == 4096
    assert span(32768, 64, 2, 132, equal=True) == 16384
    assert span(32768, 64, 4, 132) == 32768
