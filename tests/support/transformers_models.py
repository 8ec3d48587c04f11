"""Architectures under test: a tiny random model of each, made in the test and on every rank alike."""

from __future__ import annotations

import torch

from tests.support.transformers_case import EXPERTS, LATENT, Case, case
from tests.support.transformers_case import SMALL as SMALL
from tests.support.transformers_case import VOCABULARY as VOCABULARY
from tests.support.transformers_recurrent import RECURRENT
from tests.support.transformers_softmax import SOFTMAX

DSA = LATENT | dict(q_lora_rank=8, index_topk=8, index_head_dim=8, index_n_heads=12, n_group=1, topk_group=1)
INDEXED: dict[str, Case] = {
    "deepseek_v32": case("DeepseekV32ForCausalLM", n_routed_experts=4, first_k_dense_replace=1, **DSA, **EXPERTS),
    "glm_moe_dsa": case("GlmMoeDsaForCausalLM", n_routed_experts=4, indexer_types=["full", "shared"], **DSA, **EXPERTS),
    "hy_v4": case("HYV4ForCausalLM", num_experts=4, num_local_experts=4, **DSA, **EXPERTS),
    "hy_v4_vl": case(
        "HYV4VLForConditionalGeneration",
        skip=tuple(SMALL),
        text_config=SMALL
        | DSA
        | EXPERTS
        | dict(
            num_experts=4,
            num_local_experts=4,
            mlp_layer_types=["dense", "sparse"],
            indexer_types=["full", "shared"],
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 0]),
        ),
        vision_config=dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16),
    ),
    "dots3_note": case(
        "Dots3NoteForCausalLM",
        n_routed_experts=4,
        num_hidden_layers=3,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
        mlp_layer_types=["dense", "sparse", "dense"],
        sliding_window=5,
        shared_experts_intermediate_size=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=8,
        swa_kv_lora_rank=8,
        swa_head_dim=12,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=6,
        **DSA,
        **EXPERTS,
    ),
    "minimax_m3": case(
        "MiniMaxM3VLForCausalLM",
        layer_types=["minimax_m3_sparse", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=48,
        shared_intermediate_size=16,
        rotary_dim=4,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=3,
    ),
    "axk2": case("AXK2ForCausalLM", n_routed_experts=4, **DSA, **EXPERTS),
    "mistral_large4": case(
        "MistralLarge4ForConditionalGeneration",
        skip=tuple(SMALL),
        text_config={n: x for n, x in (SMALL | DSA | EXPERTS).items() if n != "q_lora_rank"}
        | dict(
            num_hidden_layers=4,
            n_routed_experts=4,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
            no_rope_layers=[1, 0, 1, 0],
            kv_source_layers=[0, 1, 0, 1],
            indexer_types=["full", "full", "shared", "full"],
        ),
        vision_config=dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16),
    ),
}
CASES: dict[str, Case] = SOFTMAX | RECURRENT | INDEXED


def an_ulp_off(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model whose weights are an ulp off, up or down."""
    signs = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + (torch.randint(0, 2, p.shape, generator=signs) * 2 - 1) * torch.finfo(p.dtype).eps)
    return model
