"""Weights of sharded models: read by slices, drawn, and written in Transformers' own format, from any split."""

from __future__ import annotations

import json
import math
import resource
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.pool import group
from tests.support.transformers_models import CASES

MODELS = {
    1: ["qwen3_next"],
    2: ["nemotron_h"],
    3: ["kimi_linear", "qwen3_next"],  # four experts over three ranks are 2, 2 and 0
    4: ["qwen3_5_moe", "kimi_linear"],
}


def empty(folder: str, ranks: int):
    """The model of a folder on "meta", its layers and the rest sharded over so many ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    mesh = DeviceMesh.from_group(group(ranks), "cpu")
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def there_and_back(rank: int, folders: list[str], ranks: int) -> list[tuple[int, int]]:
    """Read each folder, compare with the whole model, write it again; bytes read, and held when writing."""
    from transformers import AutoModelForCausalLM

    from ring_la.integrations.transformers.weights import load_weights, save_weights

    out = []
    for folder in folders:
        model = empty(folder, ranks)
        read = load_weights(model, folder)
        whole = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
        state = model.state_dict()
        assert state.keys() == whole.keys()
        for name, x in state.items():
            x = x.full_tensor() if hasattr(x, "full_tensor") else x
            assert torch.equal(x, whole[name]), name
        for name, b in model.named_buffers():
            assert not b.is_meta, name
            assert torch.isfinite(b).all(), name
        ids = torch.arange(3, 24)[None]
        assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
        held = save_weights(model, f"{folder}-by-{ranks}", file_bytes=30_000)
        out.append((read, held))
        if find_spec("peft"):
            adapt(rank, model, ids, f"{folder}-adapters-{ranks}")
    return out


def adapt(rank: int, model, ids: torch.Tensor, folder: str) -> None:
    """Adapters of a sharded model, drawn here; they and what the model says with them go to a folder."""
    from peft import LoraConfig

    from ring_la.integrations.transformers.adapters import add_adapters, all_linear

    adapted = add_adapters(model, LoraConfig(r=2, task_type="CAUSAL_LM", **all_linear(model)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in adapted.named_parameters():
            assert p.requires_grad == ("lora_" in n), n
            if "lora_B" in n:  # which begin as zeros
                p.copy_(torch.randn(p.shape, generator=generator))
        logits = adapted(input_ids=ids, use_cache=False).logits
    if rank == 0:
        adapted.save_pretrained(folder)
        torch.save(logits, f"{folder}/logits.pt")


@pytest.mark.parametrize("ranks_", [1, 2, 3, 4])
def test_weights_go_to_shards_and_back_without_a_whole_copy(ranks, tmp_path, ranks_):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folders, expected, sizes = [], {}, {}
    for name in MODELS[ranks_]:
        model = CASES[name].make()
        folder = str(tmp_path / name)
        model.save_pretrained(folder, max_shard_size="30KB")
        assert Path(folder, "model.safetensors.index.json").exists()
        folders.append(folder)
        expected[folder] = model.state_dict()
        sizes[folder] = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
    for found in ranks.run(ranks_, there_and_back, folders, ranks_):
        for folder, (read, held) in zip(folders, found):
            share = {1: 1.0, 2: 0.65, 3: 0.65, 4: 0.4}[ranks_]
            assert read <= sizes[folder] * share, (folder, read, sizes[folder])
            assert held <= 30_000, "more than a file"
    for folder in folders:
        out = Path(f"{folder}-by-{ranks_}")
        index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"].keys()
        for file in set(index.values()):
            with safe_open(out / file, "pt") as opened:
                assert {n for n, f in index.items() if f == file} == set(opened.keys())
        back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        assert all(torch.equal(x, expected[folder][n]) for n, x in back.items())
        if find_spec("peft"):
            adapted(folder, f"{folder}-adapters-{ranks_}")
        assert math.isclose(sum(f.stat().st_size for f in out.glob("*.safetensors")), sizes[folder], rel_tol=0.05)


def adapted(folder: str, adapters: str) -> None:
    """PEFT reads them onto the whole model, which then says the same."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapters)
    with torch.no_grad():
        logits = whole(input_ids=torch.arange(3, 24)[None], use_cache=False).logits
    expected = torch.load(f"{adapters}/logits.pt", weights_only=True)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def unlike(rank: int, folder: str, three: str) -> None:
    """What one rank cannot read or write every rank says; three experts are not spread over four ranks under FSDP2."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import AutoConfig, AutoModelForCausalLM

    import ring_la
    from ring_la import ArgumentError, UnsupportedError
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts
    from ring_la.integrations.transformers.weights import load_weights, save_weights
    from ring_la.training import TrainingMesh, shard_parameters

    with pytest.raises(ArgumentError, match=r"folder: expected .*, got .*nowhere"):
        load_weights(empty(folder, 4), f"{folder}/nowhere" if rank == 1 else folder)
    model, most = empty(folder, 4), resource.getrlimit(resource.RLIMIT_FSIZE)
    load_weights(model, folder)
    with pytest.raises(ArgumentError, match="folder: expected one without weights"):
        save_weights(model, folder if rank == 1 else f"{three}/none")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
    try:
        with pytest.raises(ArgumentError, match=r"folder: expected one that every rank can write to.*\(rank 1: "):
            save_weights(model, f"{three}/full", file_bytes=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(three), dtype=torch.float32)
    parallelize(model, ring_la.ContextParallel(group(), scan="ring"), check=False)
    spread = split_experts(model, DeviceMesh.from_group(group(), "cpu"))
    with pytest.raises(UnsupportedError, match="experts: expected one for each of 4 context ranks, 1 to a rank, got 3"):
        shard_parameters(model, TrainingMesh.make("cpu"), blocks=model.model.layers, methods=(), experts=spread)


def test_a_rank_that_cannot_go_on_is_not_alone(ranks, tmp_path):
    model = CASES["qwen3_5_moe"].make()
    model.save_pretrained(tmp_path / "four")
    model.config.num_experts = 3
    model.config.save_pretrained(tmp_path / "three")
    ranks.run(4, unlike, str(tmp_path / "four"), str(tmp_path / "three"))


def drawn(rank: int, folder: str, ranks: int) -> dict[str, torch.Tensor]:
    from ring_la import ArgumentError
    from ring_la.integrations.transformers.weights import draw_weights, load_weights

    model = empty(folder, ranks)
    draw_weights(model, seed=3)
    with pytest.raises(ArgumentError, match="folder: expected a folder with"):
        load_weights(model, f"{folder}/nowhere")
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in model.state_dict().items()}


def test_drawn_weights_do_not_depend_on_the_split(ranks, tmp_path):
    model = CASES["qwen3_next"].make()
    model.config.save_pretrained(tmp_path)
    one, three = (ranks.run(n, drawn, str(tmp_path), n)[0] for n in (1, 3))
    assert one.keys() == model.state_dict().keys()
    for name, x in one.items():
        assert torch.equal(x, three[name]), name
    assert 0.01 < float(one["model.embed_tokens.weight"].std()) < 0.03
