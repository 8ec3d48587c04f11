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
        with torch.no_grad():  # zeros and ones of an initialisation would hide terms of the gradients
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        return model.train()


def case(model: str, skip: tuple[str, ...] = (), router: bool = False, **options: object) -> Case:
    return Case(model, options, skip, router)


SOFTMAX: dict[str, Case] = {
    "llama": case("LlamaForCausalLM"),
}
RECURRENT: dict[str, Case] = {
    "qwen3_next": case(
        "Qwen3NextForCausalLM",
        router=True,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}
CASES: dict[str, Case] = SOFTMAX | RECURRENT

Factory = Callable[[], torch.nn.Module]
