"""What a model of Transformers asks of one rank, for ``ring-la plan``: read off the model its configuration makes on
the meta device.

Parameters, products and states are counted. Bytes kept for the backward pass are estimated, two a number: what each
linear layer takes and gives, what a token's experts take and give, and both norms. They matter where nothing is
recomputed, and while one layer is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError, UnsupportedError
from .workload import BlockWork, Workload


def of_folder(folder: Path) -> Workload:
    """The work of the model whose config.json this folder has.

    Raises:
        ArgumentError: no such configuration. UnsupportedError: a layer whose speed was never measured.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, StopIteration) as error:
        why, *_ = str(error).splitlines() or [type(error).__name__]  # what follows lists all models there are
        raise ArgumentError(
            "--transformers", "a folder with a causal model's config.json", f"{folder} ({why})"
        ) from None
    config = model.config.get_text_config()
    blocks = tuple(_block(layer, config) for layer in layers)
    ends = sum(p.numel() for p in model.parameters()) - sum(block.parameters for block in blocks)
    return Workload(config.hidden_size, blocks, ends, config.vocab_size, library=True)


def _block(layer: nn.Module, config: Any) -> BlockWork:
    mixer = _mixer(layer, config)
    recurrence, heads, K, V = ("", 0, 1, 1) if mixer is None else _state(mixer, config) or ("", 0, 1, 1)
    inside = set() if mixer is None else {id(m) for m in mixer.modules()}
    linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    experts = [m for m in layer.modules() if hasattr(m, "has_gate") and hasattr(m, "down_proj")]
    chosen = getattr(config, "num_experts_per_tok", 0)
    stacked = sum(p.numel() for m in experts for p in m.parameters())
    met = sum(p.numel() // p.shape[0] * chosen for m in experts for p in m.parameters() if p.dim() == 3)
    own = sum(2 * (m.in_features + m.out_features) for m in linear if id(m) in inside)
    other = sum(2 * (m.in_features + m.out_features) for m in linear if id(m) not in inside)
    other += sum(2 * chosen * sum(p.shape[1] + p.shape[2] for p in m.parameters() if p.dim() == 3) for m in experts)
    softmax = mixer is not None and not recurrence
    return BlockWork(
        layer="attention" if softmax else recurrence or "mlp",
        parameters=sum(p.numel() for p in layer.parameters()),
        multiplied=sum(m.weight.numel() for m in linear) + met,
        layer_saved=own,
        mlp_saved=other,
        norm_saved=4 * config.hidden_size,
        recurrence=recurrence,
        heads=heads,
        K=K,
        V=V,
        kv=_keys(mixer) if softmax else 0,
        experts=stacked,
        met=met,
        routed=2 * chosen * config.hidden_size if experts else 0,
        window=_window(mixer, config) if softmax else -1,
    )


def _mixer(layer: nn.Module, config: Any) -> Any:
    """What of a layer is along the sequence; None: nothing."""
    found = [m for m in layer.modules() if _state(m, config) is not None]
    inner = {id(m) for outer in found for m in outer.modules() if m is not outer}
    outer = [m for m in found if id(m) not in inner]
    if len(outer) > 1:
        names = " and ".join(type(m).__name__ for m in outer)
        raise UnsupportedError("--transformers", "layers of one kind each", f"{type(layer).__name__} of {names}")
    return outer[0] if outer else None


def _state(module: Any, config: Any) -> tuple[str, int, int, int] | None:
    """(recurrence, heads, K, V) of a layer along the sequence, "" for softmax attention; None: it is none."""
    name = type(module).__name__
    if name.endswith("GatedDeltaNet"):
        return "gated_delta_rule", module.num_v_heads, module.head_k_dim, module.head_v_dim
    if name.endswith("DeltaAttention"):
        return "kda", module.num_heads, module.head_dim, module.head_dim
    if hasattr(module, "ssm_state_size") and hasattr(module, "head_dim"):
        return "simple_gla", module.num_heads, module.ssm_state_size, module.head_dim
    if hasattr(module, "ssm_state_size"):
        raise UnsupportedError("--transformers", "layers whose speed was measured", name)
    if name.endswith("Attention") and (hasattr(module, "q_proj") or hasattr(module, "q_a_proj")):
        width = getattr(module, "head_dim", None) or module.qk_head_dim
        return "", config.num_attention_heads, width, width
    if name.endswith(("Attention", "Mixer", "ShortConv", "RecurrentBlock")):
        raise UnsupportedError("--transformers", "layers whose speed was measured", name)
    return None


def _window(mixer: Any, config: Any) -> int:
    """Earlier keys a query sees, −1: all. Layers of several kinds know their own window, others the configuration's."""
    own = getattr(config, "sliding_window", None) if getattr(config, "layer_types", None) is None else None
    keys = getattr(mixer, "sliding_window", own)
    return keys - 1 if keys else -1


def _keys(mixer: Any) -> int:
    """Bytes of keys and values a token, or of the latents that travel in their place."""
    if hasattr(mixer, "kv_lora_rank"):
        return 2 * (mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    return 2 * (mixer.k_proj.out_features + mixer.v_proj.out_features)
