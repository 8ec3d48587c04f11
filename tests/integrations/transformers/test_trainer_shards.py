"""`ContextTrainer` on a model of shards: read by slices, trained, written for Transformers, gone on from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.support.transformers_models import CASES

from .test_calls import close
from .test_training import Data, accelerate_of_its_own

STEPS = 2


def arguments(folder: Path, **options: object):
    from transformers import TrainingArguments

    # with an eps of 1 AdamW's updates are smooth in the gradients, so that rounding stays rounding
    fixed = dict(use_cpu=True, max_steps=STEPS, save_steps=1, learning_rate=1e-2, adam_epsilon=1.0, max_grad_norm=0.5)
    quiet = dict(report_to=[], logging_strategy="no", disable_tqdm=True, optim="adamw_torch")
    return TrainingArguments(str(folder), **(fixed | quiet | options))


def sharded(context: int, *, average: bool = True, spread: bool = False):
    """The model of a folder on fsdp × context ranks, all of the pool; its experts spread over the context ranks."""
    from transformers import AutoModelForCausalLM

    import ring_la
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts
    from ring_la.training import TrainingMesh, shard_parameters

    mesh = TrainingMesh.make("cpu", fsdp=4 // context, context=context)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CASES["qwen3_next"].make().config, dtype=torch.float32)
    parallelize(model, ring_la.ContextParallel(mesh.context, scan="ring", attention="ring"), average=True)
    experts = split_experts(model, mesh.context) if spread else []
    return shard_parameters(model, mesh, blocks=model.model.layers, methods=(), experts=experts, average=average)


def adapted(model):
    """With adapters that change what it computes from the first step on; a router that none has."""
    from peft import LoraConfig

    from ring_la.integrations.transformers.adapters import add_adapters

    names = ["q_proj", "v_proj", "in_proj_qkvz", "out_proj", "down_proj"]
    return add_adapters(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False))


def join(rank: int) -> None:
    """What torchrun would have set."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def go_on(rank: int, start: str, folder: str, context: int, checkpoint: str | None, what: str = "") -> float:
    """In the pool: the run on 4 / context × context ranks, from weights or from a checkpoint; bytes read of them."""
    from ring_la.errors import DisagreementError, UnsupportedError
    from ring_la.integrations.transformers import ContextTrainer
    from ring_la.integrations.transformers.weights import load_weights

    model = sharded(context, spread=what == "experts")
    read = load_weights(model, start)
    model = adapted(model) if what == "adapters" else model
    with accelerate_of_its_own():
        join(rank)
        clipped = {"max_grad_norm": 0.0} if what == "adapters" else {}
        rows = arguments(Path(folder), per_device_train_batch_size=context, **clipped)
        trainer = ContextTrainer(model=model, args=rows, train_dataset=Data())
        trainer.train(resume_from_checkpoint=checkpoint)
    if checkpoint is None and what == "adapters":
        with torch.no_grad():
            trainer.copies[0][0, 0] += rank
        with accelerate_of_its_own():
            join(rank)
            with pytest.raises(DisagreementError, match="the weights, of which every rank must have the same"):
                ContextTrainer(model=model, args=arguments(Path(folder)))
    if checkpoint is None and not what:
        sums = sharded(context, average=False)
        for other, options, message in ((sums, {}, "expected one whose shards' gr"), (model, {"bf16": True}, "bf16: ")):
            with accelerate_of_its_own():
                join(rank)
                given = arguments(Path(folder), **options)
                with pytest.raises(UnsupportedError, match=message):
                    ContextTrainer(model=other, args=given)
    return read


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    if (folder / "adapter_model.safetensors").exists():
        return load_file(folder / "adapter_model.safetensors")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_shards_are_trained_written_and_gone_on_with_on_other_axes(ranks, tmp_path):
    from transformers import Trainer

    model, begin, alone = CASES["qwen3_next"].make(), tmp_path / "begin", tmp_path / "alone"
    model.save_pretrained(begin, max_shard_size="30KB")
    Trainer(model=model, args=arguments(alone, per_device_train_batch_size=4), train_dataset=Data()).train()
    read = ranks.run(4, go_on, str(begin), str(tmp_path / "a"), 2, None)
    size = sum(f.stat().st_size for f in begin.glob("*.safetensors"))
    assert max(read) < 0.4 * size
    first = str(tmp_path / "a" / "checkpoint-1")
    ranks.run(4, go_on, str(begin), str(tmp_path / "b"), 4, first)
    assert not (tmp_path / "b" / "checkpoint-1").exists(), "done again"
    ranks.run(4, go_on, str(begin), str(tmp_path / "c"), 2, None, "experts")
    ranks.run(4, go_on, str(begin), str(tmp_path / "d"), 4, str(tmp_path / "c" / "checkpoint-1"), "experts")
    compare(tmp_path, weights(begin), ("ac", "abcd"))


def test_adapters_on_shards_are_trained_and_gone_on_with_on_other_axes(ranks, tmp_path):
    """Whole on every rank, their gradients averaged over all of them; not clipped, which would hide a factor."""
    pytest.importorskip("peft")
    from transformers import Trainer

    model, begin, alone = CASES["qwen3_next"].make(), tmp_path / "begin", tmp_path / "alone"
    model.save_pretrained(begin)
    model = adapted(model)
    model.save_pretrained(tmp_path / "started")
    given = arguments(alone, per_device_train_batch_size=4, max_grad_norm=0.0)
    Trainer(model=model, args=given, train_dataset=Data()).train()
    ranks.run(4, go_on, str(begin), str(tmp_path / "a"), 2, None, "adapters")
    ranks.run(4, go_on, str(begin), str(tmp_path / "b"), 4, str(tmp_path / "a" / "checkpoint-1"), "adapters")
    assert not (tmp_path / "b" / "checkpoint-1").exists(), "done again"
    compare(tmp_path, weights(tmp_path / "started"), ("a", "ab"))


def compare(folder: Path, started: dict[str, torch.Tensor], runs: tuple[str, str]) -> None:
    """Weights after each step of these runs beside those of one process."""
    for step, names in enumerate(runs, 1):
        expected = weights(folder / "alone" / f"checkpoint-{step}")
        moved = max(float((x - started[n]).abs().max()) for n, x in expected.items())
        assert moved > 1e-4
        for run in names:
            found = weights(folder / run / f"checkpoint-{step}")
            assert found.keys() == expected.keys()
            for n, x in found.items():
                close(x, expected[n], atol=1e-3 * moved, msg=lambda m, n=n, run=run: f"{run} {n}: {m}")
