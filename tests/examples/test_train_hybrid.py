"""The training example: a rank killed at any step changes nothing, and another number of ranks goes on."""

from __future__ import annotations

import importlib.util
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
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.hybrid_run.options import Config, Data, Optimizer, Run
from ring_la.reading import contents
from ring_la.serving.load import load
from ring_la.training import Corpus, Work
from ring_la.training.stored import restore
from tests.support.pool import RankError, Ranks
from tests.support.train_example import ROOT, SCRIPT, example, train

pytest.importorskip("jsonargparse")

STEPS = 8
OPTIONS = {
    "model.dim": 16,
    "model.layers": "[gdn,attention]",
    "data.source": str(ROOT / "docs"),
    "data.seq_len": 97,
    "data.max_document": 40,
    "data.sequences": 4,
    "optimizer.warmup": 2,
    "optimizer.lr": 0.01,
    "memory.recompute": "[gdn]",
    "run.steps": STEPS,
    "run.save_every": 2,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    options = OPTIONS | {"run.folder": folder} | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"--{name}={value}" for name, value in options.items()]


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


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, whole lines alone."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in found}


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
        reaches(max(curve(folder)) + STEPS, folder, process, log)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("data.sequences", 0), ("optimizer.clip", 0.0), ("run.steps", -1), ("run.keep", 0), ("memory.offload", -1.0)],
        *[("optimizer.beta2", 1.5), ("optimizer.weight_decay", -1.0), ("data.max_document", 1), ("run.rehearse", 1)],
        *[("memory.recompute", ["nosuch"]), ("run.pretrained", "out"), ("model.lora_targets", ["q_proj"])],
        *[("model.lora", 4), ("model.lora", 0), ("model.scratch", True), ("model.spread_experts", True)],
    ],
)
def test_numbers_that_would_train_nothing_are_refused(name, value):
    script, (part, option) = example(), name.split(".")
    config = script.Config()
    script.check(config)
    setattr(getattr(config, part), option, value)
    with pytest.raises(script.ArgumentError, match=f"{name}: expected"):
        script.Trainer(config, torch.device("cpu"))


@pytest.mark.parametrize("documents", ["packed", "balanced"])
def test_long_documents_are_cut(documents):
    script = example()
    config = script.Config(data=Data(source="", seq_len=64, documents=documents, max_document=10))
    mesh, flops = SimpleNamespace(replicas=1), SimpleNamespace(work=Work)
    corpus = Corpus.__new__(Corpus)
    corpus.tokens, corpus.offsets = torch.arange(90).int(), torch.tensor([0, 85, 90])
    corpus.documents, corpus.size = 2, 90
    run = dict(config=config, mesh=mesh, flops=flops, corpus=corpus, cp=SimpleNamespace(size=2), step=0, tokens=0)
    cu = script.Trainer._sequences(SimpleNamespace(**run))[0][1]
    assert 10 >= max(b - a for a, b in zip(cu, cu[1:])) > 1


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
    assert pair.run(2, cut_off, arguments(tmp_path, run__save_every=5), timeout=30) == [said] * 2
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


def test_warm_up_and_cosine():
    optimizer = Optimizer(lr=2.0, final=0.1, warmup=4)
    rates = [optimizer.rate(step, 12) for step in range(14)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(2.0 * 0.55)
    assert rates[12:] == pytest.approx([0.2, 0.2])


class Board:
    """What stands in for TensorBoard's writer and for wandb: keeps the calls."""

    def __init__(self, *args: object, **keywords: object) -> None:
        self.started, self.calls = (args, keywords), []

    def add_scalar(self, *args: object) -> None:
        self.calls.append(args)

    def log(self, *args: object, **keywords: object) -> None:
        self.calls.append((args, keywords))


def test_tensorboard_and_wandb_get_what_metrics_jsonl_gets(tmp_path, monkeypatch):
    script, made = example(), []

    def init(*args: object, **keywords: object) -> Board:
        made.append(Board(*args, **keywords))
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=init))
    folder = tmp_path / "run-a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 4, "loss": 1.5, "grad_norm": 1}\n{"step": 5, "loss": 1.4, "grad_norm": 1}\n{"step": 6, "lo'
    )
    config = Config(run=Run(tensorboard=True, wandb="project"))
    log = script.Log(config, folder, 4, {})  # started again from the checkpoint of step 4
    log.write(5, {"loss": 1.25, "grad_norm": 3.0})
    log.file.close()
    assert curve(folder) == {4: (1.5, 1), 5: (1.25, 3.0)}
    board, wandb = made
    assert board.started == ((str(folder / "tensorboard"),), {"purge_step": 5})  # the first that is done again
    assert board.calls == [("loss", 1.25, 5), ("grad_norm", 3.0, 5)]
    assert {k: wandb.started[1][k] for k in ("project", "id", "resume")} == {
        "project": "project", "id": "run-a", "resume": "allow"
    }  # fmt: skip
    assert wandb.calls == [(({"loss": 1.25, "grad_norm": 3.0},), {"step": 5})]


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_before_anything_starts(option, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == option else find(name))
    with pytest.raises(SystemExit, match=f"run.{option}: needs the package {option}"):
        example().main([f"--run.{option}=true"])


def refused(rank: int, options: list[str], message: str) -> None:
    """In the pool: a run that its configuration ends."""
    with pytest.raises(example().ArgumentError, match=message):
        train(rank, options)


def test_a_model_of_transformers_trains_alike_on_any_split(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.LlamaConfig(**shape, **heads).save_pretrained(tmp_path / "model")
    options = {"model__transformers": tmp_path / "model", "model__scratch": True, "run__steps": 2, "run__save_every": 0}
    ranks.run(4, train, arguments(tmp_path / "a", **options))
    ranks.run(
        4, train, arguments(tmp_path / "b", parallel__data=2, memory__recompute="[]", memory__loss_chunk=10, **options)
    )
    for step, values in curve(tmp_path / "a").items():
        torch.testing.assert_close(torch.tensor(curve(tmp_path / "b")[step]), torch.tensor(values), rtol=1e-4, atol=0)
    assert abs(curve(tmp_path / "a")[1][0] - 5.55) < 0.1
    options["model__transformers"] = tmp_path / "nowhere"
    ranks.run(4, refused, arguments(tmp_path / "c", **options), "model.transformers: expected a folder or name")


def test_a_mixture_goes_on_over_other_ranks_and_is_written_and_adapted(ranks, tmp_path):
    """Experts over context ranks beside fsdp, then over those alone; written for Transformers; adapters alone."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    load_file = pytest.importorskip("safetensors.torch").load_file
    shape = {"vocab_size": 257, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "moe_intermediate_size": 8, "num_experts": 4}
    shape |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 8}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 2}
    transformers.Qwen3_5MoeTextConfig(**shape, **kinds).save_pretrained(tmp_path / "model")
    options = {"model__transformers": tmp_path / "model", "model__scratch": True, "run__steps": 2, "run__save_every": 1}
    options |= {"run__background": False, "data__documents": "balanced"}
    spread = {"model__spread_experts": True, "parallel__fsdp": 2}
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    ranks.run(4, train, arguments(a, **options, **spread, run__pretrained=out))
    shutil.copytree(a, b, ignore=shutil.ignore_patterns("step-00000002"))
    ranks.run(4, train, arguments(b, **options, model__spread_experts=True, parallel__layout="balanced"))
    assert curve(b)[1] == curve(a)[1], "not done again"
    torch.testing.assert_close(torch.tensor(curve(b)[2]), torch.tensor(curve(a)[2]), rtol=1e-4, atol=0)
    weights = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    restored = {name: torch.zeros_like(x) for name, x in weights.items()}
    restore(a, restored)
    assert all(torch.equal(x, weights[name]) for name, x in restored.items())
    lora = options | {"model__transformers": out, "model__scratch": False, "model__lora": 2, "memory__offload": 1.0}
    lora |= {"parallel__attention": "ulysses", "parallel__head_groups": 2, "parallel__layout": "balanced"}
    ranks.run(4, train, arguments(tmp_path / "c", **lora, parallel__data=2, run__pretrained=tmp_path / "adapters"))
    assert abs(curve(tmp_path / "c")[1][0] - curve(a)[2][0]) < 0.2
    assert "lora_A" in str(list(load_file(tmp_path / "adapters" / "adapter_model.safetensors")))
    stored = contents(next((tmp_path / "c" / "checkpoints").glob("step-00000002"))).state_dict_metadata
    assert all("lora" in name for name in stored if name.startswith("model."))
