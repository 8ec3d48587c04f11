"""The training example's options and what it writes down, in one process."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from examples.hybrid_run.options import Config, Data, Optimizer, Run
from ring_la.training import Corpus, Work
from tests.support.train_example import curve, example

pytest.importorskip("jsonargparse")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("data.sequences", 0), ("optimizer.clip", 0.0), ("run.steps", -1), ("run.keep", 0), ("memory.offload", -1.0)],
        *[("optimizer.beta2", 1.5), ("optimizer.weight_decay", -1.0), ("data.max_document", 1), ("run.rehearse", 1)],
        *[("run.rehearse", 4097), ("parallel.head_groups", 0)],
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


@pytest.mark.parametrize(
    ("part", "option", "value", "named"),
    [("model", "transformers", "out", "run.step"), ("memory", "keep_attention", True, "memory.keep_attention")],
)
def test_what_a_compiled_step_has_not_is_refused(part, option, value, named):
    script = example()
    config = script.Config(run=Run(step="compiled"))
    script.check(config)
    setattr(getattr(config, part), option, value)
    with pytest.raises(script.ArgumentError, match=f"{named}: expected"):
        script.check(config)


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
