"""Every causal language model of the installed Transformers, shrunk: equal on two ranks, or refused by name.

    python -m tests.integrations.transformers.sweep [model type …]

Prints a line for each: "equal" with the largest error, "refused" with the module named, "skipped" where no small model
could be made or the library itself cannot run it, and "WRONG", which must never appear; exits with the number of those.
"""

from __future__ import annotations

import signal
import sys
import traceback
import warnings

import torch

from tests.support.transformers_models import CASES

LENGTH = 41
SIZES = {
    32: "hidden_size n_embd d_model dim embed_dim embedding_size word_embed_proj_dim n_inner emb_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size inner_dim d_ff encoder_ffn_dim decoder_ffn_dim mlp_size",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads mamba_n_heads "
    "mamba_num_heads index_n_heads n_mamba_heads num_decoder_attention_heads",
    2: "num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok moe_k moe_topk top_k_experts "
    "linear_num_key_heads mamba_n_groups n_groups num_layers_per_stack linear_num_heads mamba_expand",
    8: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "global_head_dim mamba_d_state ssm_state_size state_size sliding_window attention_window adapter_rank block_size "
    "time_step_rank index_head_dim hidden_size_per_layer_input rotary_dim mamba_chunk_size chunk_size q_lora_rank",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size mamba_d_head mamba_head_dim "
    "expert_ffn_hidden_size index_topk lru_width attention_hidden_size expert_intermediate_size",
    3: "num_hidden_layers n_layer num_layers decoder_layers n_layers",
    1: "n_group topk_group first_k_dense_replace num_dense_layers encoder_layers num_encoder_layers n_shared_experts "
    "moe_layer_start_index num_nextn_predict_layers",
    64: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len context_length",
}
"""A small value for what a configuration may call its sizes."""


EXTRA: dict[str, dict] = {
    "big_bird": dict(attention_type="original_full"),
    "blt": dict(encoder_hash_byte_group_vocab=40, encoder_hash_byte_group_size=[2, 3]),
    "blt_global_transformer": dict(hidden_size=64),
    "blt_local_encoder": dict(hidden_size_global=64),
    "blt_local_decoder": dict(hidden_size_global=64),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            n: {"rope_type": "default", "rope_theta": 100.0} for n in ("sliding_attention", "full_attention")
        },
    ),
    "dbrx": dict(
        d_model=32,
        n_heads=4,
        n_layers=3,
        attn_config=dict(kv_n_heads=2, rope_theta=100.0, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "dory": dict(initializer_range=1.0),  # its scales are parameters over this: else rounding is amplified 1e5 times
    "fuyu": dict(image_token_id=3),
    "gemma3n_text": dict(num_kv_shared_layers=1, laurel_rank=4, layer_types=["full_attention"] * 3),
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8),
    "longcat_flash": dict(num_key_value_heads=4, zero_expert_num=2, head_dim=4),
    "musicgen_decoder": dict(num_codebooks=1),
    "musicgen_melody_decoder": dict(num_codebooks=1),
    "phimoe": dict(router_jitter_noise=0.0, input_jitter_noise=0.0),
    "reformer": dict(
        axial_pos_embds=False,
        attention_head_size=8,
        feed_forward_size=48,
        num_attention_heads=4,
        attn_layers=["local", "lsh"],
        num_buckets=2,
        local_attn_chunk_length=8,
        lsh_attn_chunk_length=8,
        hash_seed=0,
    ),
    "roc_bert": dict(pronunciation_vocab_size=16, shape_vocab_size=16, pronunciation_embed_dim=8, shape_embed_dim=8),
    "xlm": dict(n_heads=4, n_layers=2, causal=True, summary_first_dropout=0.0),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=6,
        layers_block_type=["mamba", "hybrid"] * 3,
        num_key_value_heads=4,
        attention_hidden_size=64,
        attention_head_dim=16,
        n_mamba_heads=2,
    ),
}
"""What a model type needs besides."""


class Absent(Exception):
    """No small model of this architecture."""


def sizes_of(config_class: type) -> dict[str, object]:
    """Small values for the sizes a configuration knows, those of its parts included."""
    known = getattr(config_class, "__dataclass_fields__", {})
    attributes = getattr(config_class, "attribute_map", {})
    sizes: dict[str, object] = {n: value for value, names in SIZES.items() for n in names.split() if n in known}
    sizes = {n: x for n, x in sizes.items() if n not in attributes}
    if "qk_rope_head_dim" in known:
        sizes |= dict(qk_rope_head_dim=4, num_key_value_heads=4)
    if "is_decoder" in known:
        sizes["is_decoder"] = True
    sizes |= {key: x for key, x in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)) if key in known}
    parts = getattr(config_class, "sub_configs", {})
    default = config_class() if parts and not EXTRA.get(config_class.model_type, {}).keys() >= parts.keys() else None
    for name in parts:
        part = getattr(default, name, None)
        if part is not None:
            sizes[name] = sizes_of(type(part)) | {"model_type": part.model_type}
    return sizes | EXTRA.get(config_class.model_type, {})


def small(kind: str) -> torch.nn.Module:
    """A tiny seeded model of a model type, all its parameters random."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    name = name if isinstance(name, str) else name[0]
    case = next((case for case in CASES.values() if case.model == name), None)
    if case is not None and kind not in EXTRA:
        return case.make()
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class(**sizes_of(model_class.config_class))
        config._attn_implementation = "eager"
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
        if count > 8_000_000:
            raise Absent(f"{count / 1e6:.0f}M parameters")
        torch.manual_seed(0)
        model = model_class(config)
    except Absent:
        raise
    except Exception as e:
        raise Absent(f"{type(e).__name__}: {e}".splitlines()[0][:150]) from e
    with torch.no_grad():
        for label, p in model.named_parameters():
            noise = torch.randn_like(p)
            if p.dim() < 2 or "A_log" in label:
                p.add_(0.2 * noise)
            else:
                p.copy_(noise / p.shape[-1] ** 0.5)
    for module in model.modules():
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def ids(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(7))


def check(rank: int, kind: str) -> tuple[str, str]:
    """What becomes of one architecture: (verdict, details)."""
    from transformers.utils import logging

    import ring_la
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=60)
    tokens = ids()
    try:
        whole = small(kind)
        expected = whole(input_ids=tokens, labels=tokens, use_cache=False)
        expected.loss.backward()
        with torch.no_grad():
            again = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
        if again != expected.loss:
            return "skipped", "random in training"
    except Absent as e:
        return "skipped", str(e)
    except Exception as e:
        try:
            parallelize(small(kind), cp)
        except ring_la.RingLAError as refusal:
            return "refused", str(refusal)[:230]
        return "skipped", f"the library fails: {type(e).__name__}: {e}".splitlines()[0][:150]
    try:
        model = parallelize(small(kind), cp)
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
    except ring_la.RingLAError as e:
        return "refused", str(e)[:230]
    except Exception:
        return "crashed", " | ".join(traceback.format_exc().strip().splitlines()[-3:])[:400]
    out.loss.backward()
    layout = out.layout
    errors = {"loss": _error(out.loss.detach(), expected.loss.detach())}
    if out.logits is not None and expected.logits.shape[1] == LENGTH:
        errors["logits"] = _error(layout.gather(out.logits.detach().contiguous()), expected.logits.detach())
    for (label, p), q in zip(model.named_parameters(), whole.parameters()):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        total = cp.comm.all_reduce(grad.contiguous()).wait()
        errors[label] = _error(total, torch.zeros_like(q) if q.grad is None else q.grad)
    worst = max(errors, key=lambda n: errors[n])
    wrong = errors["loss"] > 1e-4 or errors.get("logits", 0) > 1e-3 or errors[worst] > 1e-2
    return "WRONG" if wrong else "equal", f"{errors[worst]:.1e} {worst}, loss {errors['loss']:.1e}"


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / max(float(b.abs().max()), 1e-2)) if b.numel() else 0.0


def main(kinds: list[str]) -> int:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.support.pool import RankError, Ranks

    ranks, verdicts = Ranks(), {}
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            results = ranks.run(2, check, kind)
            verdict = next((r for r in results if r[0] == "WRONG"), results[0])
            if len({r[0] for r in results}) > 1:
                verdict = ("WRONG", f"ranks differ: {results}")
        except RankError as e:
            verdict = ("WRONG", f"a rank failed: {str(e).strip().splitlines()[-1]}")
        verdicts[kind] = verdict
        print(f"{kind:28} {verdict[0]:8} {verdict[1]}", flush=True)
    ranks.stop()
    counts = {v: sum(x[0] == v for x in verdicts.values()) for v in sorted({x[0] for x in verdicts.values()})}
    print(counts)
    return counts.get("WRONG", 0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
