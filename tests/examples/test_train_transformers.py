"""The training example on models of Transformers: alike on any split, mixtures and adapters."""

from __future__ import annotations

import shutil

import pytest
import torch

from ring_la.reading import contents
from ring_la.training.stored import restore
from tests.support.train_example import arguments, curve, example, train

pytest.importorskip("jsonargparse")


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
