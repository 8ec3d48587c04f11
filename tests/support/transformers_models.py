"""Architectures under test: a tiny random model of each, made in the test and on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

VOCABULARY = 64
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@dataclass(frozen=True)
class Case:
    """A model class and what its configuration has beyond `SMALL`.

    Attributes:
        model: name of the class with a language model's head.
        options: keywords of the configuration.
        skip: keywords of `SMALL` the configuration does not know.
        router: whether its experts have a load-balancing loss.
    """

    model: str
    options: dict
    skip: tuple[str, ...] = ()
    router: bool = False

    def make(self) -> torch.nn.Module:
        """The model, the same every time, in fp32."""
        kind = getattr(transformers, self.model)
        keywords = {n: x for n, x in SMALL.items() if n not in self.skip} | self.options
        config = kind.config_class(**keywords)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = kind(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        with torch.no_grad():  # small weights, zeros and ones of an initialisation would hide what layers do
            for name, p in model.named_parameters():
                noise = torch.randn_like(p)
                if p.dim() < 2 or "A_log" in name:
                    p.add_(0.2 * noise)
                else:
                    p.copy_(noise / p.shape[-1] ** 0.5)
        return model.train()


def case(model: str, skip: tuple[str, ...] = (), router: bool = False, **options: object) -> Case:
    return Case(model, options, skip, router)


SOFTMAX: dict[str, Case] = {
    "llama": case("LlamaForCausalLM"),
    "mistral": case("MistralForCausalLM", sliding_window=7),
    "qwen2": case(
        "Qwen2ForCausalLM",
        skip=("head_dim",),
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "qwen3": case("Qwen3ForCausalLM"),
    "gemma2": case(
        "Gemma2ForCausalLM",
        sliding_window=6,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": case(
        "Gemma3ForCausalLM",
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": case(
        "GptOssForCausalLM",
        router=True,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo3": case(
        "Olmo3ForCausalLM",
        skip=("head_dim",),
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mixtral": case("MixtralForCausalLM", router=True, num_local_experts=4),
    "llama4": case(
        "Llama4ForCausalLM",
        attention_chunk_size=6,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0, 1],
        attn_temperature_tuning=False,
        num_local_experts=2,
        intermediate_size_mlp=48,
    ),
    "deepseek_v3": case(
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "phi3_longrope": case(
        "Phi3ForCausalLM",
        skip=("head_dim",),
        original_max_position_embeddings=30,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 30,
        },
    ),
    "llama_dynamic": case(
        "LlamaForCausalLM",
        max_position_embeddings=30,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    ),
    "gptj": case("GPTJForCausalLM", skip=("intermediate_size", "num_key_value_heads", "head_dim"), rotary_dim=4),
    "gpt_neo": case(
        "GPTNeoForCausalLM",
        skip=("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
    ),
    "falcon": case(
        "FalconForCausalLM",
        skip=("intermediate_size", "num_key_value_heads", "head_dim"),
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "gpt_neox_japanese": case(
        "GPTNeoXJapaneseForCausalLM",
        skip=("intermediate_size", "num_key_value_heads", "head_dim"),
        intermediate_multiple_size=2,
    ),
    "xglm": case(
        "XGLMForCausalLM",
        skip=(
            *("hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
        ),
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt2": case("GPT2LMHeadModel", skip=("intermediate_size", "num_key_value_heads", "head_dim")),
}
LINEAR, FULL, CONV, SLIDING = "linear_attention", "full_attention", "conv", "sliding_attention"
GATED_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
)
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2)
SHARED = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=16)
GROUPED = EXPERTS | dict(num_local_experts=4, n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse", "dense"])
LATENT = dict(kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_key_value_heads=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=8)


def hybrid(model: str, kinds: str = "LFL", argument: str = "layer_types", **keywords) -> Case:
    """A hybrid whose layers' kinds are given by letters, one a layer."""
    names = {"L": LINEAR, "F": FULL, "C": CONV, "S": SLIDING, "H": "hybrid", "E": "moe", "M": "mlp"}
    keywords |= {argument: [names[k] for k in kinds], "num_hidden_layers": len(kinds)}
    return case(model, **keywords)


NO_ATTENTION = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

RECURRENT: dict[str, Case] = {
    "qwen3_next": hybrid("Qwen3NextForCausalLM", router=True, **GATED_DELTA, **SHARED),
    "qwen3_5": hybrid("Qwen3_5ForCausalLM", **GATED_DELTA),
    "qwen3_5_with_images": case(
        "Qwen3_5ForConditionalGeneration",
        skip=tuple(SMALL),
        text_config=SMALL | GATED_DELTA | dict(layer_types=[LINEAR, FULL]),
        vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32),
    ),
    "qwen3_5_moe": hybrid("Qwen3_5MoeForCausalLM", "FLL", router=True, **GATED_DELTA, **SHARED),
    "olmo_hybrid": hybrid("OlmoHybridForCausalLM", **GATED_DELTA),
    "kimi_linear": hybrid("KimiLinearForCausalLM", linear_head_dim=8, linear_num_heads=2, **LATENT, **GROUPED),
    "bailing_hybrid": hybrid("BailingHybridForCausalLM", "FLL", **LATENT, **GROUPED),
    "minimax": hybrid("MiniMaxForCausalLM", router=True, num_local_experts=2, num_experts_per_tok=1, block_size=8),
    "mamba2": case(
        "Mamba2ForCausalLM",
        skip=("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        num_heads=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        time_step_limit=(0.01, 0.8),
    ),
    "mamba": case("MambaForCausalLM", skip=NO_ATTENTION, state_size=4, time_step_rank=3),
    "falcon_mamba": case("FalconMambaForCausalLM", skip=NO_ATTENTION, state_size=4, time_step_rank=3),
    "jamba": case(
        "JambaForCausalLM",
        num_hidden_layers=4,
        router=True,
        skip=("head_dim",),
        mamba_d_state=4,
        mamba_dt_rank=4,
        num_experts=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "zamba": case(
        "ZambaForCausalLM",
        skip=("head_dim",),
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_d_state=4,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "rwkv": case("RwkvForCausalLM", skip=NO_ATTENTION),
    "recurrent_gemma": case(
        "RecurrentGemmaForCausalLM",
        num_hidden_layers=3,
        block_types=["recurrent", "attention", "recurrent"],
        lru_width=32,
        attention_window_size=5,
    ),
    "bamba": case("BambaForCausalLM", num_hidden_layers=3, attn_layer_indices=[1], **MAMBA),
    "falcon_h1": case("FalconH1ForCausalLM", mamba_d_ssm=64, mamba_rms_norm=True, **MAMBA),
    "nemotron_h": hybrid(
        "NemotronHForCausalLM",
        "LEFML",
        "layers_block_type",
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=16,
        **EXPERTS,
    ),
    "granite_moe_hybrid": hybrid(
        "GraniteMoeHybridForCausalLM",
        router=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **MAMBA,
    ),
    "zamba2": hybrid(
        "Zamba2ForCausalLM",
        "LHL",
        "layers_block_type",
        skip=("head_dim",),
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=8,
        adapter_rank=4,
        num_key_value_heads=4,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    "lfm2": hybrid("Lfm2ForCausalLM", "CFC", conv_bias=True),
    "lfm2_moe": hybrid("Lfm2MoeForCausalLM", "CFC", num_experts=4, num_dense_layers=1, **EXPERTS),
    "lfm3": hybrid("Lfm3ForCausalLM", "SCF", sliding_window=5),
    "xlstm": case(
        "xLSTMForCausalLM",
        skip=("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        num_heads=4,
        chunk_size=8,
        ffn_round_up_to_multiple_of=8,
    ),
    "zaya": case(
        "ZayaForCausalLM",
        skip=("intermediate_size",),
        layer_types=["hybrid", "hybrid_sliding"],
        sliding_window=5,
        moe_intermediate_size=16,
        num_experts=4,
        router_hidden_size=8,
        attention_bias=True,
    ),
    "glm5_next": case(
        "Glm5NextForConditionalGeneration",
        skip=tuple(SMALL),
        text_config=SMALL
        | LATENT
        | EXPERTS
        | dict(
            num_hidden_layers=3,
            layer_types=[LINEAR, FULL, FULL],
            indexer_types=["full", "full", "shared"],
            mlp_layer_types=["dense", "sparse", "dense"],
            n_routed_experts=4,
            q_lora_rank=8,
            qk_rope_head_dim=0,
            index_topk=8,
            index_head_dim=8,
            index_n_heads=12,
            index_kpool=4,
            linear_head_dim=8,
            linear_num_heads=2,
            hc_mult=2,
            hc_sinkhorn_iters=3,
        ),
        vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32),
    ),
    "qwen4_exp": hybrid(
        "Qwen4ExpForCausalLM",
        router=True,
        hc_count=2,
        hc_lowrank=4,
        ple_layer_ids=[1],
        ple_embed_dim=16,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        indexer_n_heads=12,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=4,
        **GATED_DELTA,
        **SHARED,
    ),
}
DSA = LATENT | dict(q_lora_rank=8, index_topk=8, index_head_dim=8, index_n_heads=12, n_group=1, topk_group=1)
INDEXED: dict[str, Case] = {
    "deepseek_v32": case("DeepseekV32ForCausalLM", n_routed_experts=4, first_k_dense_replace=1, **DSA, **EXPERTS),
    "glm_moe_dsa": case("GlmMoeDsaForCausalLM", n_routed_experts=4, indexer_types=["full", "shared"], **DSA, **EXPERTS),
    "hy_v4": case("HYV4ForCausalLM", num_experts=4, num_local_experts=4, **DSA, **EXPERTS),
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

Factory = Callable[[], torch.nn.Module]
