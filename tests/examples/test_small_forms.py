"""The examples that no other test runs, each as its page says, in its small form: tiny, random, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ALONE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def said(ranks: int, script: str, *options: str) -> str:
    """What the example prints; without torchrun for one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    environment = {n: x for n, x in os.environ.items() if n not in ALONE} | ENVIRONMENT
    command = [sys.executable, *torchrun, str(EXAMPLES / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("script", "name", "shape"),
    [("text_to_image.py", "image.png", "128 x 128"), ("text_to_video.py", "video.gif", "9 frames of 96 x 64")],
)
def test_an_image_and_a_video_are_written(script, name, shape, tmp_path):
    pytest.importorskip("diffusers")
    out = tmp_path / name
    assert f"{out}: {shape}" in said(2, script, "--steps=2", f"--out={out}")
    assert out.stat().st_size > 1000


def test_a_mixture_of_experts_trains_without_torchrun():
    lines = said(1, "moe_hybrid.py", "--steps=3", "--seq-len=64").splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("layer")] == ["layer 0", "layer 1", "layer 2"]
