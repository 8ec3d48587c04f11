"""The examples that no other test runs, each as its page says, in its small form: tiny, random, offline."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ALONE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def said(script: str, *options: str, torchrun: bool = False) -> str:
    """What the example prints on one rank, which torchrun starts if asked to."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"] if torchrun else []
    environment = {n: x for n, x in os.environ.items() if n not in ALONE} | ENVIRONMENT
    command = [sys.executable, *start, str(EXAMPLES / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_pool(rank: int, script: str, *options: str) -> str:
    """In the pool, whose ranks have met already: what the example prints."""
    sys.path.insert(0, str(EXAMPLES))
    joined = mock.patch("torch.distributed.init_process_group")
    alone = mock.patch.object(sys, "argv", [script, *options])
    with joined, alone, redirect_stdout(StringIO()) as out:
        importlib.import_module(script).main()
    return out.getvalue()


def test_an_image_is_written_by_torchrun_and_the_same_by_four_ranks(ranks, tmp_path):
    pytest.importorskip("diffusers")
    image = pytest.importorskip("PIL.Image")
    one, two = (tmp_path / name for name in ("one.png", "two.png"))
    assert f"{one}: 128 x 128" in said("text_to_image.py", "--steps=2", f"--out={one}", torchrun=True)
    assert f"{two}: 128 x 128" in ranks.run(4, in_pool, "text_to_image", "--steps=2", f"--out={two}")[0]
    pairs = zip(image.open(one).tobytes(), image.open(two).tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1, "of 255"


def test_a_video_is_written(ranks, tmp_path):
    """Its start is the image's: `join` in examples/pipelines.py."""
    pytest.importorskip("diffusers")
    out = tmp_path / "video.gif"
    first, *others = ranks.run(4, in_pool, "text_to_video", "--steps=2", f"--out={out}")
    assert f"{out}: 9 frames of 96 x 64" in first
    assert others == [""] * 3
    assert out.stat().st_size > 1000


def test_a_mixture_of_experts_trains_without_torchrun():
    lines = said("moe_hybrid.py", "--steps=3", "--seq-len=64").splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("layer")] == ["layer 0", "layer 1", "layer 2"]
