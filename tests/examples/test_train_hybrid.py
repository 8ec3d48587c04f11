"""The training example: a rank killed at any step changes nothing, and another number of ranks goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch

from ring_la.serving.load import load
from tests.support.pool import RankError, Ranks
from tests.support.train_example import ROOT, SCRIPT, STEPS, arguments, curve, example, train

pytest.importorskip("jsonargparse")


def start(ranks: int, options: list[str], *torchrun: str, log: Path) -> subprocess.Popen:
    """The script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with open(log, "w") as out:
        return subprocess.Popen([*command, *torchrun, str(SCRIPT), *options], stdout=out, stderr=out, env=environment)


def rank_process(agent: int, rank: int) -> int:
    """The process of a rank under a torchrun."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Path:
    """A run on 4 ranks that nothing disturbed, with a trace."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(4, train, arguments(folder, run__profile=1, run__keep=9))
    return folder


def test_it_learns_and_leaves_what_was_asked_for(whole):
    losses = [curve(whole)[s][0] for s in range(1, STEPS + 1)]
    assert losses[-1] < losses[0] - 0.3
    assert json.loads((whole / "config.json").read_text())["data"]["seq_len"] == 97
    served, text = load(whole)
    ids = torch.tensor([text.encode((ROOT / "README.md").read_text()[:97])])
    assert served.model.loss(ids) < losses[0] - 0.2
    assert "gated_delta_rule" in (whole / "profile" / "rank-0.json").read_text() or (
        "aten::mm" in (whole / "profile" / "rank-0.json").read_text()
    )
    assert sorted(f.name for f in (whole / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in (2, 4, 6, 8)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """A job of two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def reaches(step: int, folder: Path, process: subprocess.Popen, log: Path) -> None:
    """Waits until a run has done a step."""
    deadline = time.monotonic() + 240
    while max(curve(folder), default=0) < step:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the rank to kill in /proc")
@pytest.mark.distributed
def test_a_killed_rank_changes_no_bit_and_sigterm_leaves_a_checkpoint(pair, tmp_path):
    """SIGTERM to a rank: all save and end. SIGKILL to a rank: all start again. SIGTERM to torchrun, which tells its
    ranks: all save and end.

    One start of torchrun, because most of the time is its ranks' imports; the rate does not depend on the number of
    steps, so that the steps compared are those of a run that ends.
    """
    whole, folder, log = (tmp_path / name for name in ("whole", "run", "log.txt"))
    pair.run(2, train, arguments(whole, optimizer__final=1.0))
    endless = {"optimizer__final": 1.0, "run__steps": 10**6}
    said = pair.run(2, told_to_stop, arguments(folder, run__save_every=10**6, **endless), folder)[0]
    first = max(curve(folder))
    stopped(said, folder, first)
    process = start(2, arguments(folder, run__save_every=5, **endless), "--max-restarts=1", log=log)
    try:
        reaches(max(first + 1, 6), folder, process, log)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        reaches(max(max(curve(folder)) + 3, STEPS), folder, process, log)
        process.send_signal(signal.SIGTERM)
        process.wait(60)  # which ends with the signal it got
    finally:
        process.kill()
    starts = [int(step) for step in re.findall(r"going on from step (\d+) of", log.read_text())]
    assert starts[0] == first
    assert len(starts) == 2
    done, expected = curve(folder), curve(whole)
    assert max(expected) == STEPS
    assert {step: done[step] for step in expected} == expected
    stopped(log.read_text(), folder, max(done))


def told_to_stop(rank: int, options: list[str], folder: Path) -> str:
    """In the pool: what a run prints whose rank 1 gets SIGTERM behind some step."""

    def signal_it() -> None:
        while max(curve(folder), default=0) < 3:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    watch = threading.Thread(target=signal_it, daemon=True)
    if rank == 1:
        watch.start()
    return told(rank, options)


def stopped(said: str, folder: Path, last: int) -> None:
    """A run that was told to stop did so after a step whose checkpoint is whole."""
    assert f"stopped by SIGTERM after step {last} of " in said, said
    assert (folder / "checkpoints" / f"step-{last:08d}" / ".metadata").exists()


def check_close(folder: Path, whole: Path) -> None:
    ours, theirs = curve(folder), curve(whole)
    assert max(ours) == STEPS
    for step, values in theirs.items():
        torch.testing.assert_close(torch.tensor(ours[step]), torch.tensor(values), rtol=1e-4, atol=0)


def interrupted(whole: Path, folder: Path) -> Path:
    """The same run as it was after 4 steps."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("step-00000006", "step-00000008"))
    return folder


@pytest.mark.parametrize(
    "axes",
    [
        {"parallel__data": 2, "parallel__layout": "balanced", "parallel__attention": "ulysses"},
        {"parallel__data": 2, "parallel__fsdp": 2},
    ],
)
def test_another_split_of_the_ranks_goes_on(ranks, whole, tmp_path, axes):
    folder = interrupted(whole, tmp_path / "run")
    ranks.run(4, train, arguments(folder, **axes))
    check_close(folder, whole)


@pytest.mark.parametrize("size", [1, 2])
def test_another_number_of_ranks_goes_on(pair, whole, tmp_path, size):
    folder, fewer = interrupted(whole, tmp_path / "run"), pair if size == 2 else Ranks(size)
    try:
        fewer.run(size, train, arguments(folder))
    finally:
        if fewer is not pair:
            fewer.stop()
    check_close(folder, whole)


def test_the_same_ranks_go_on_to_the_bit(ranks, whole, tmp_path):
    folder = interrupted(whole, tmp_path / "run")
    ranks.run(4, train, arguments(folder))
    assert curve(folder) == curve(whole)


def train_compiled(rank: int, options: list[str]) -> int:
    """In the pool: a run of the script, traced as on GPUs but without a compiler; how many graphs there were."""
    compiled, found = torch.compile, torch._dynamo.utils.counters["stats"]
    before = found["unique_graphs"]
    with (
        mock.patch.object(torch, "compile", partial(compiled, backend="aot_eager")),
        torch._dynamo.config.patch(specialize_float=True),
    ):
        train(rank, options)
    return found["unique_graphs"] - before


def test_a_compiled_step_is_the_eager_one(pair, tmp_path):
    """Of sequences of several lengths, with tiles and recomputation, sharded by FSDP2: one graph for each half of a
    block."""
    eager, folder = tmp_path / "eager", tmp_path / "compiled"
    changes = dict(model__layers="[gdn]", run__steps=2, data__documents="balanced", memory__mlp_chunk=15)
    pair.run(2, train, arguments(eager, **changes))
    graphs = pair.run(2, train_compiled, arguments(folder, run__step="compiled", **changes))
    for step, expected in curve(eager).items():
        assert curve(folder)[step] == pytest.approx(expected, rel=1e-5)
    assert len(curve(folder)) == 2
    assert graphs == [2, 2]


def told(rank: int, options: list[str]) -> str:
    """In the pool: what a run prints."""
    with redirect_stdout(StringIO()) as out:
        train(rank, options)
    return out.getvalue()


def test_another_model_is_refused_and_other_data_is_said(ranks, whole, tmp_path):
    folder = interrupted(whole, tmp_path / "run")
    with pytest.raises(RankError, match=r"run.folder: expected a folder of its own .* dim=32, got .* with dim=16"):
        ranks.run(4, train, arguments(folder, model__dim=32))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"corpus": "of other files"}))
    said, *others = ranks.run(4, told, arguments(folder, data__seed=5, run__steps=4))
    assert "going on from step 4 of 4, data.seed 5, files of data.source have changed: " in said
    assert f"nothing is left to do in {folder}" in said
    assert others == [""] * 3


def cut_off(rank: int, options: list[str]) -> str:
    """In the pool: a run whose last rank cannot read what comes third; what it says."""
    script = example()

    def batches(sequences: object, **keywords: object):
        for i, sequence in enumerate(all_of(sequences, **keywords)):
            if rank == 1 and i == 8:
                raise OSError("no such disk")
            yield sequence

    all_of = script.batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "batches", batches)
        with pytest.raises(SystemExit) as ended:
            train(rank, options)
    return str(ended.value)


def test_what_one_rank_cannot_read_ends_all(pair, tmp_path):
    said = "stopped by rank 1: OSError: no such disk after step 2 of 8; started again, it goes on from there"
    assert pair.run(2, cut_off, arguments(tmp_path, run__save_every=5)) == [said] * 2
    assert [f.name for f in tmp_path.glob("checkpoints/*")] == ["step-00000002"]


def without_end(rank: int, options: list[str]) -> None:
    """In the pool: a run whose first gradient is not finite while its loss is."""
    script = example()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "clip_gradients", lambda *_: torch.tensor(float("inf")))
        with pytest.raises(SystemExit, match=r"step 0: the loss is 5.* the norm of its gradient inf"):
            train(rank, options)


def test_weights_that_are_lost_are_not_kept(pair, tmp_path):
    pair.run(2, without_end, arguments(tmp_path, run__save_every=1))
    assert not list(tmp_path.glob("checkpoints/step-*"))
