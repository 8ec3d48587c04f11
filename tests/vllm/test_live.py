"""vLLM decodes what ring_la's ranks read: live requests, on CPUs. Needs vLLM: bash launch/vllm.sh."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm here; bash launch/vllm.sh has it"),
]


def live(*arguments: object) -> dict:
    command = [sys.executable, "-m", "tests.vllm.live", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr[-4000:]}


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("qwen3", 2),
        ("gemma3", 3),
        ("qwen3_next", 3),
        ("granite", 2),
        ("deepseek_v2", 2),
        ("deepseek_v3", 3),
        ("falcon_h1", 3),
        ("nemotron_h", 2),
        ("zamba2", 3),
    ],
)
def test_tokens_are_vllm_s_own(model, ranks, tmp_path):
    """Three prompts at once, of which the shortest is not worth asking for."""
    said = live("equal", model, ranks, tmp_path)
    assert said["ours"] == said["own"], said["stderr"]
    assert said["read"] == 2
    for spoiled, own in zip(said["spoiled"][:2], said["own"]):
        assert sum(a == b for a, b in zip(spoiled, own)) <= 3  # of 12: a random model likes some of its 256 tokens
    assert said["spoiled"][2] == said["own"][2]


@pytest.mark.parametrize(("model", "ranks"), [("mamba", 2), ("falcon_mamba", 3), ("jamba", 3)])
def test_tokens_after_mamba_1_are_those_of_transformers(model, ranks, tmp_path):
    """vLLM reads no Mamba-1 on a CPU, so there are none of its own; one layer's token is computed for it."""
    said = live("decoded", model, ranks, tmp_path)
    assert said["ours"] == said["own"], said["stderr"]
    assert said["read"] == 2


def test_a_reader_on_another_host(tmp_path):
    """What both have in common is a network: NIXL over TCP."""
    pytest.importorskip("nixl")
    said = live("hosts", "qwen3_next", 2, tmp_path)
    assert said["ours"] == said["own"], said["stderr"]
    assert said["read"] == 2
    assert said["spoiled"][0] != said["own"][0]


@pytest.mark.parametrize("model", ["qwen3_next", "granite", "deepseek_v2"])
def test_each_worker_of_a_tensor_parallel_vllm_has_its_heads(model, tmp_path):
    """One head of keys that both have, one group of B and C, latents; heads and channels that are shared out."""
    said = live("workers", model, tmp_path)
    assert said["ours"] == said["own"], said["stderr"]
    assert said["read"] == 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_others_go_on_while_a_prompt_is_read_and_when_the_reader_dies(policy, tmp_path):
    said = live("faults", policy, tmp_path)
    assert said["before the long one"] == said["later"] == 12
    if policy == "fail":
        assert (said["reason"], said["long"]) == ("error", [])
    else:
        assert said["after"] == said["long"] == said["own"]
