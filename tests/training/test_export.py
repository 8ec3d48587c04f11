"""``ring-la export``: what a run of any split left, for others to read."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ring_la import ArgumentError, ContextParallel
from ring_la.cli.main import main
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving.load import load
from ring_la.training import Checkpoints, TrainingMesh, export, shard_parameters
from tests.support.pool import group


def test_a_hybrid_model_goes_out_and_is_served(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors")
    model = HybridLM(HybridConfig(257, 16, ["gdn", "attention"], 2))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps({"hybrid": model.config.to_dict(), "data": {"tokenizer": "bytes"}, "model": {}})
    )
    for step in (1, 2):
        with torch.no_grad():
            model.embedding.weight.fill_(step)
        dcp.save({"model": model.state_dict()}, checkpoint_id=run / f"checkpoints/step-{step:08d}", no_dist=True)
    assert main(["export", str(run), str(tmp_path / "folder")]) == 0
    assert "folder/model.safetensors" in capsys.readouterr().out
    served, _ = load(tmp_path / "folder")
    for name, weight in served.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert main(["export", str(run), str(tmp_path / "one.safetensors"), "--step", "1", "--dtype", "bfloat16"]) == 0
    with safetensors.safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert HybridConfig(**json.loads(file.metadata()["ring_la"])["hybrid"]) == model.config
        assert torch.equal(file.get_tensor("embedding.weight"), torch.ones(257, 16, dtype=torch.bfloat16))
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "folder")]) == 2
    assert "out: expected a file or folder that is not there yet" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "x"), "--step", "7"]) == 2
    assert "step: expected one of [1, 2], got 7" in capsys.readouterr().err


def test_a_full_disk_is_told(tmp_path, capsys):
    pytest.importorskip("safetensors")
    model, run = HybridLM(HybridConfig(257, 16, ["gdn"], 2)), tmp_path / "model.pt"
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, run)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert main(["export", str(run), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "out: expected a place with room, which can be written" in capsys.readouterr().err


def check_run(rank: int, folder: str, base: str) -> dict[str, torch.Tensor]:
    """A checkpoint of a tied model of Transformers whose parameters are sharded over the ranks."""
    from transformers import AutoModelForCausalLM

    from ring_la.integrations.transformers import parallelize

    model = parallelize(AutoModelForCausalLM.from_pretrained(base), ContextParallel(group(), scan="ring"))
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    model = shard_parameters(model, TrainingMesh.make("cpu", context=4), blocks=layers, methods=())
    Checkpoints(f"{folder}/checkpoints", background=False).save(
        3, model, torch.optim.SGD(model.parameters(), lr=0.1), {"tokens": 0}
    )
    return weights


def test_a_model_of_transformers_becomes_its_own_folder(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = dict(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=True))
    base.save_pretrained(tmp_path / "base")
    run = tmp_path / "run"
    weights = ranks.run(4, check_run, str(run), str(tmp_path / "base"))[0]
    about = {"hybrid": None, "data": {"tokenizer": "bytes"}, "model": {"transformers": str(tmp_path / "base")}}
    Path(run / "config.json").write_text(json.dumps(about))
    (tmp_path / "base/model.safetensors").unlink()  # what is written comes from the checkpoint
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert back.keys() == weights.keys()
    assert all(torch.equal(x, weights[name]) for name, x in back.items())
    for name, wrong in (("dtype", "int8"), ("run", None), ("out", 3)):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            export(**{"run": run, "out": tmp_path / "more"} | {name: wrong})
