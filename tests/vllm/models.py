"""Architectures that vLLM decodes after ring_la's ranks have read: tiny random models, on disk.

vLLM's kernels for CPUs take heads of 32 channels and more, those of gated delta nets 64 and bf16. The others are fp32,
where vLLM and Transformers agree on what a random model likes best; of Nemotron-H they agree in bf16 (docs/notebook).
"""

from __future__ import annotations

from pathlib import Path

import torch

SMALL = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
MAMBA = dict(
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_d_state=32,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=64,
)
LATENT = dict(
    head_dim=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    q_lora_rank=None,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
"""vLLM's latent attention for CPUs takes these sizes alone."""
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        dict(sliding_window=64, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"]),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        dict(
            num_key_value_heads=1,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
        ),
    ),
    "granite": (
        "GraniteMoeHybridForCausalLM",
        dict(
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=96,
            position_embedding_type="rope",
            **MAMBA,
        ),
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT | dict(topk_method="greedy")),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT | dict(topk_method="noaux_tc")),
    "falcon_h1": ("FalconH1ForCausalLM", dict(mamba_d_ssm=128, **MAMBA)),
    "nemotron_h": (
        "NemotronHForCausalLM",
        dict(
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=32,
            n_groups=1,
            conv_kernel=4,
            chunk_size=64,
            expand=2,
        ),
    ),
    "mamba": ("MambaForCausalLM", dict(hidden_size=64, state_size=16, time_step_rank=4, conv_kernel=4, expand=2)),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        dict(hidden_size=64, state_size=16, time_step_rank=4, conv_kernel=4, expand=2),
    ),
    "jamba": (
        "JambaForCausalLM",
        dict(
            num_experts=1,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=16,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        dict(
            num_hidden_layers=3,
            head_dim=64,
            attention_head_dim=64,
            attention_hidden_size=128,
            mamba_d_state=32,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_ngroups=1,
            n_mamba_heads=4,
            layers_block_type=["mamba", "hybrid", "mamba"],
            chunk_size=64,
        ),
    ),
}
"""By name: the class of Transformers, and what its configuration has beyond `SMALL`."""


def plain(name: str) -> bool:
    """Whether vLLM is to rotate in PyTorch: its kernel for CPUs turns strided rotary keys of latents wrongly."""
    return name.startswith("deepseek")


def dtype(name: str) -> str:
    """Of a model's weights."""
    return "bfloat16" if name in ("qwen3_next", "nemotron_h") else "float32"


def save(name: str, folder: Path) -> None:
    """The model, the same every time, with logits far apart."""
    import transformers

    model_class, options = MODELS[name]
    kind = getattr(transformers, model_class)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SMALL | options))
    with torch.no_grad():
        for tensor_name, p in model.named_parameters():
            noise = torch.randn_like(p)
            if p.dim() < 2 or "A_log" in tensor_name:
                p.add_(0.2 * noise)
            else:
                wide = 2.0 if "embed" in tensor_name or "lm_head" in tensor_name else 1.0
                p.copy_(wide * noise / p.shape[-1] ** 0.5)
    model.to(getattr(torch, dtype(name))).save_pretrained(folder)
