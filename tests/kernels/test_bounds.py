"""The interpreter that looks at bounds (tests/support/bounds.py), in a process of its own: it patches Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

KERNEL = """
import sys

import torch

from tests.support.bounds import look_at_bounds
from tests.support.interpreter import interpreted

interpreted()
look_at_bounds()

import triton
import triton.language as tl

from ring_la.kernels.runtime.launch import launch


@triton.jit(do_not_specialize=("count", "first"))
def moved(x, out, count, first, BN: tl.constexpr):
    i = tl.arange(0, BN)
    tl.store(out + i, tl.load(x + first + i, i < count, other=0.0), i < count)


memory = torch.arange(64.0)  # what is left and right of x is there, and not x
x, out = memory[16:40], torch.zeros(24)
launch(moved, (1,), x, out, int(sys.argv[1]), int(sys.argv[2]), BN=32)
assert torch.equal(out, x)
"""


def interpreted(*sizes: int) -> subprocess.CompletedProcess[str]:
    """Of a kernel that copies so many numbers from the first on, of 24."""
    command = [sys.executable, "-", *map(str, sizes)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, input=KERNEL, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_what_leaves_its_tensor_is_an_error():
    """Also where another tensor's memory is next to it."""
    pytest.importorskip("triton")
    done = interpreted(24, 0)
    assert done.returncode == 0, done.stderr
    for sizes, what in (((24, 1), "a load of 1 numbers"), ((24, -1), "a load of 1 numbers"), ((25, 0), "a load of 1")):
        done = interpreted(*sizes)
        assert done.returncode
        assert f"moved: {what}" in done.stderr, done.stderr
