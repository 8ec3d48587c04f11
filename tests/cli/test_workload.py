"""What a model asks, by which ``ring-la plan`` goes: parameters, work and bytes of its layers."""

from __future__ import annotations

import pytest
import torch

from ring_la.cli.transformers_work import of_folder
from ring_la.cli.workload import RECURRENCES, Workload
from ring_la.errors import UnsupportedError
from ring_la.models import HybridLM
from ring_la.nn import LAYERS, Attention
from tests.cli.plans import config

UNRATED = ("nsa", "moba")


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in UNRATED])
def test_a_layer_s_parameters_and_work_are_counted(name):
    work = Workload.of(config(name, name))
    model = HybridLM(config(name, name))
    assert work.parameters == sum(p.numel() for p in model.parameters())
    block = work.blocks[0]
    assert 0 < block.multiplied <= block.parameters
    assert block.saved > 4 * 32
    if issubclass(LAYERS[name], Attention):
        assert (block.recurrence, block.heads, block.K, block.kv) == ("", 2, 16, 2 * 2 * 32)
    elif name in ("mla", "dsa"):
        assert (block.recurrence, block.heads, block.K, block.kv) == ("", 2, 20, 2 * (64 + 8))
    else:
        state = model.blocks[0].layer(torch.randn(1, 2, 32), output_state=True).state.recurrent
        assert block.state.b.shape == state.shape
        assert block.recurrence == RECURRENCES[name]


@pytest.mark.parametrize("name", UNRATED)
def test_a_layer_without_a_rate_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"^layers: "):
        Workload.of(config(name))


def test_experts_count_by_the_active_ones():
    moe = config("gla", mlp="moe", mlp_dim=32, mlp_options=dict(experts=8, top_k=2))
    block = Workload.of(moe).blocks[0]
    all_experts = 8 * 3 * 32 * 32
    assert block.parameters - block.multiplied >= all_experts * 6 / 8
    assert block.multiplied > all_experts * 2 / 8
    assert block.met == all_experts * 2 / 8


def test_what_is_kept_is_what_the_fused_operators_keep():
    """bf16, a token: inputs of products, convolution, norms and recurrence; no intermediate in fp32."""
    block, D = Workload.of(config("gdn")).blocks[0], 32
    hidden = HybridLM(config("gdn")).blocks[0].mlp.out_proj.in_features
    assert block.norm_saved == 2 * D
    assert block.mlp_saved <= 2 * (D + 5 * hidden)
    assert 2 * 8 * D < block.layer_saved < 2 * 20 * D


def test_windows_of_transformers_are_seen(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    few = {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16, "sliding_window": 8}
    transformers.Gemma3TextConfig(**shape, **few, layer_types=["sliding_attention", "full_attention"]).save_pretrained(
        tmp_path / "gemma"
    )
    transformers.MistralConfig(**shape, **few).save_pretrained(tmp_path / "mistral")
    windows = {name: [b.window for b in of_folder(tmp_path / name).blocks] for name in ("gemma", "mistral")}
    assert windows == {"gemma": [7, -1], "mistral": [7, 7]}
    transformers.RecurrentGemmaConfig(**shape, num_hidden_layers=3, vocab_size=64).save_pretrained(tmp_path / "rglru")
    with pytest.raises(UnsupportedError, match="got RecurrentGemmaRecurrentBlock"):
        of_folder(tmp_path / "rglru")
