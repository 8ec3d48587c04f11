"""How kernels in CUDA C++ are launched, with a driver that only takes note."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ring_la.kernels.runtime import cuda_kernel
from ring_la.kernels.runtime.cuda_kernel import INVALID_CONTEXT, CudaKernel, LoadedCudaKernel


class Driver:
    """Of a thread that has no context until one is made current."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.launched, self.current = answers, [], []

    def launch(self, *args) -> int:
        self.launched.append(args)
        return self.answers.pop(0)

    def cuDevicePrimaryCtxRetain(self, context, device: int) -> int:
        context._obj.value = 100 + device
        return 0

    def cuCtxSetCurrent(self, context) -> int:
        self.current.append(context.value)
        return 0

    def cuGetErrorString(self, code: int, name) -> int:
        name._obj.value = b"refused"
        return 0


@pytest.fixture
def driver(monkeypatch):
    def made(answers: list[int]) -> Driver:
        driver = Driver(answers)
        monkeypatch.setattr(cuda_kernel, "_driver", lambda: driver)
        monkeypatch.setattr(cuda_kernel, "_launcher", lambda: driver.launch)
        monkeypatch.setattr(cuda_kernel, "_early_launcher", lambda: driver.launch)
        return driver

    return made


def loaded(early: bool) -> LoadedCudaKernel:
    return LoadedCudaKernel(CudaKernel(Path("kernel.cu"), "kernel", "Qi4x", 128, 64, early=early), 7, device=3)


@pytest.mark.parametrize("early", [False, True])
def test_a_thread_without_a_context_gets_the_device_s(driver, early):
    """Autograd's thread, for one, which has called nothing of CUDA's runtime."""
    said, kernel = driver([INVALID_CONTEXT, 0, 0]), loaded(early)
    kernel(5, 11, (4096, 9))
    assert said.current == [103]
    assert len(said.launched) == 2
    kernel(5, 11, (4096, 9))
    assert len(said.launched) == 3


@pytest.mark.parametrize(("early", "call"), [(False, "cuLaunchKernel:"), (True, "cuLaunchKernelEx:")])
def test_what_the_driver_refuses_is_an_error(driver, early, call):
    driver([INVALID_CONTEXT, INVALID_CONTEXT])
    with pytest.raises(RuntimeError, match=f"{call} refused \\(201\\)"):
        loaded(early)(5, 11, (4096, 9))


def test_an_early_launch_says_how(driver):
    said, kernel = driver([0]), loaded(True)
    kernel(5, 11, (4096, 9))
    (at, function, parameters, extra), *_ = said.launched
    assert (function.value, parameters) == (7, None)
    how = cuda_kernel._Configuration.from_address(at)
    assert ([*how.grid], [*how.block], how.shared, how.stream, how.count) == ([5, 1, 1], [128, 1, 1], 64, 11, 1)
    assert (how.attributes[0].id, how.attributes[0].value[0]) == (6, 1)
    room = kernel._rooms[0]
    assert extra is room.extra
    assert struct.unpack("=Qi", room.buffer.raw[:12]) == (4096, 9)
