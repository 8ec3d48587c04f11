"""Memory of a reader's rank that a worker of vLLM maps: another process, by CUDA's handles as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ring_la.integrations.vllm.memory import Shared

SIZE = 64 << 20
OTHER = """
import json, sys, torch
from ring_la.integrations.vllm.memory import mapped
x = mapped(json.loads(sys.stdin.read()), torch.device("cuda", 0))
print(x.dtype, len(x), int(x.sum()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("comes", [True, False])
def test_another_process_maps_a_rank_s_memory_and_all_of_it_comes_back(comes):
    """Where nobody comes for it, too."""
    shared = Shared(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated()
    memory, handle = shared.room(1, SIZE)
    memory.fill_(3)
    torch.cuda.synchronize()
    if comes:
        root, text = Path(__file__).parents[2], json.dumps(handle)
        command = [sys.executable, "-c", OTHER]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=root, timeout=120)
        assert done.stdout.split() == ["torch.uint8", str(SIZE), str(3 * SIZE)], done.stderr
    del memory
    shared.drop(1)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    shared.close()
