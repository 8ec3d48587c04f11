"""The example of Transformers' Trainer: as typed it learns, and so does a hybrid of ours."""

from __future__ import annotations

import os
import re
import shlex

import pytest

from tests.support.train_example import ROOT

pytest.importorskip("jsonargparse")


def train_by_trainer(rank: int, options: list[str]) -> list[float]:
    """In the pool: the losses that examples/trainer_hybrid.py logs on 4 ranks."""
    from accelerate.state import AcceleratorState, PartialState

    from examples import trainer_hybrid

    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    try:
        return [line["loss"] for line in trainer_hybrid.main(options).state.log_history if "loss" in line]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def trainer_command(page: str) -> list[str]:
    """The options of the command that a page shows for the Trainer's example."""
    text = (ROOT / page).read_text().replace("\\\n", "")
    (options,) = re.findall(r"torchrun --standalone --nproc_per_node 4 examples/trainer_hybrid\.py (--.*)", text)
    return shlex.split(options)


def test_the_trainer_s_command_learns(ranks, tmp_path):
    """As typed, but for where it writes and half of its steps."""
    pytest.importorskip("accelerate")
    words = trainer_command("examples/trainer_hybrid.py")
    assert words == trainer_command("docs/users/guides/transformers.md")
    told = dict(zip(words[::2], words[1::2]))
    assert int(told["--seq_len"]) * int(told["--max_steps"]) <= 20 * 1024, "seconds, not minutes, on a CPU"
    here = {"--source": str(ROOT / "docs"), "--output_dir": str(tmp_path), "--save_strategy": "no"}
    here |= {"--max_steps": str(int(told["--max_steps"]) // 2), "--disable_tqdm": "true", "--report_to": "none"}
    losses = ranks.run(4, train_by_trainer, [word for pair in (told | here).items() for word in pair])[0]
    assert losses[-1] < losses[0] - 0.5


def test_a_hybrid_learns_under_the_trainer(ranks, tmp_path):
    pytest.importorskip("accelerate")
    options = {"context": 2, "source": ROOT / "docs", "seq_len": 129, "sequences": 64, "output_dir": tmp_path}
    options |= {"max_steps": 4, "logging_steps": 1, "learning_rate": 0.01, "report_to": "none", "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 2, "disable_tqdm": "true", "warmup_steps": 0}
    losses = ranks.run(4, train_by_trainer, [word for n, x in options.items() for word in (f"--{n}", str(x))])
    assert abs(losses[0][0] - 5.55) < 0.15
    assert losses[0][-1] < losses[0][0] - 0.2
