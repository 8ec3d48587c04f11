"""What a tiny model of Transformers is made of: sizes, a class, and what its configuration has beyond them."""

from __future__ import annotations

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
