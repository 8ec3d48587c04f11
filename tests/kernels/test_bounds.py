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
for count, first in ((24, 0), (24, 1), (24, -1), (25, 0)):
    try:
        launch(moved, (1,), x, out, count, first, BN=32)
        print("equal" if torch.equal(out, x) else "another")
    except Exception as error:
        print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_what_leaves_its_tensor_is_an_error():
    """A kernel that copies numbers from the first on, of 24; also where another tensor's memory is next to it."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-"], input=KERNEL, env=environment, capture_output=True, text=True, timeout=120
    )
    inside, *outside = done.stdout.strip().splitlines()
    assert inside == "equal", done.stderr
    assert len(outside) == 3
    assert all("moved: a load of 1 numbers outside" in said for said in outside), outside
