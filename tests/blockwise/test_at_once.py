"""All blocks of a rank at once, as on GPUs, kernels interpreted: the first row of models of docs/users/promises.md."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.same_bits import LAYERS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_same_bits.py has it on a GPU"),
]


def told(*words: str) -> list[str]:
    """What `at_once` prints."""
    pytest.importorskip("triton")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.blockwise.at_once", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split("\n")[:-1]


def test_a_step_at_once_does_not_depend_on_ranks_or_packing():
    """Losses, gradients and logits, also of ranks without tokens."""
    (line,) = told(",".join(LAYERS))
    assert line.split()[2:] == ["equal"], line


def test_prefill_and_decoding_at_once_are_the_forward_pass():
    """A decoder has no token behind the one it reads, a forward pass all of its block."""
    models = ["kda", "rwkv7", "gla", "fox"]
    assert told("--decode", *models) == [f"{name} equal" for name in models]
