"""FLOPs of a training step: what the model asks for, not what recomputation adds.

    forward = tokens · (2 · weights of matrix products + c · H K V of each recurrence) + attention's pairs · 2 H (K + V)

Backward counts twice the forward (Chowdhery et al. 2022, arXiv 2204.02311, app. B). Attention counts the pairs of a
query and a key that its masks let see each other: half of T² for one causal document, less for packed documents and
windows; of chosen keys as many pairs as are chosen, and all pairs that an indexer scores once, without a backward pass.
c: writing ``k vᵀ`` and reading ``Sᵀ q`` are 2 each; the delta rule also reads ``Sᵀ k`` (6), rwkv7 reads and
writes once more (8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checks import check_least
from ..errors import ArgumentError, describe_tensor
from ..models import HybridConfig, HybridLM
from ..nn import (
    LAYERS,
    Attention,
    DeepSeekSparseAttention,
    KVCache,
    MixtureOfBlockAttention,
    MixtureOfExperts,
    MultiheadLatentAttention,
    NativeSparseAttention,
)

STATE_FLOPS = {"deltanet": 6, "gdn": 6, "kda": 6, "rwkv7": 8}
"""c of the layers that do more than write and read (4)."""

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12, "GB200": 2450e12}
"""Dense bf16 FLOPs a second of one GPU, by a word of its name (NVIDIA's data sheets, SXM where there are several)."""


class StepFlops:
    """FLOPs of passes through a `HybridLM` of this config.

    Attributes:
        parameters: all of the model's. per_token: forward FLOPs of a token but for softmax attention.
    """

    def __init__(self, config: HybridConfig) -> None:
        with torch.device("meta"):
            model = HybridLM(config)
        states = {name: _state(config, name) for name in set(config.layers)}
        weights = config.vocab_size * config.dim + _weights(model, exclude=model.head)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.per_token = 2.0 * weights + sum(states[name] for name in config.layers)
        self._attention = [pair for block in model.blocks for pair in _softmaxes(block.layer)]

    def work(self) -> Work:
        """What a document costs: FLOPs a token, and FLOPs a pair of a query and a key (windows are not seen)."""
        return Work(self.per_token, sum(4.0 * width for width, window in self._attention if window < 0))

    @classmethod
    def of_weights(cls, model: nn.Module, exclude: nn.Module | None = None) -> StepFlops:
        """A model of any make: its linear layers, of stacked experts those a token meets, and the softmax attention its
        configuration tells of (`layer_types`, windows, heads). Recurrences are not counted.

        Args:
            exclude: a module whose weight is looked up, not multiplied.
        """
        self = cls.__new__(cls)
        self.parameters, self._attention = sum(p.numel() for p in model.parameters()), _attention(model)
        self.per_token = 2.0 * _weights(model, exclude)
        return self

    def __call__(self, cu_seqlens: Sequence[int]) -> float:
        """FLOPs of one forward and backward pass over packed documents with these offsets ``[N+1]``."""
        lengths = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])]
        forward = sum(lengths) * self.per_token
        for width, window in self._attention:
            forward += 4.0 * width * sum(pairs(n, window) for n in lengths)
        return 3 * forward


def _attention(model: nn.Module) -> list[tuple[float, int]]:
    """Width of all heads and window of each layer of softmax attention, by a configuration of Transformers."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return []
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = kinds or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or -1
    known = {"full_attention": -1, "attention": -1, "sliding_attention": window}
    return [(width, known[kind]) for kind in kinds if kind in known]


def _weights(model: nn.Module, exclude: nn.Module | None) -> int:
    """Weights of matrix products that a token meets."""
    weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not exclude:
            weights += module.weight.numel()
        elif isinstance(module, MixtureOfExperts):
            experts = sum(p.numel() for p in module.experts.parameters())
            weights += experts * module.top_k // module.router.out_features
        elif isinstance(module, MultiheadLatentAttention):
            weights += module.k_up.numel() + module.v_up.numel()
        elif isinstance(module, NativeSparseAttention):  # its maps meet a block every `stride` tokens, not each token
            maps = sum(p.numel() for m in (module.k_map, module.v_map) for p in m.parameters() if p.dim() == 2)
            weights -= maps - maps // module.sizes["stride"]
        elif hasattr(module, "has_gate") and hasattr(module, "down_proj"):  # experts of Transformers, stacked
            config: Any = getattr(model, "config", module.config)
            chosen = config.get_text_config().num_experts_per_tok
            weights += sum(p.numel() // p.shape[0] * chosen for p in module.parameters(recurse=False) if p.dim() == 3)
    return weights


def _softmaxes(layer: object) -> list[tuple[float, int]]:
    """Of each softmax in a layer, half the channels that a pair of tokens meets, and its window."""
    if isinstance(layer, Attention):
        return [(layer.widths[0], layer.window)]
    if isinstance(layer, DeepSeekSparseAttention):
        attention = layer.num_heads * (sum(layer.q_widths) + layer.v_up.shape[1]) / 2
        index = layer.indexer.q_proj.out_features / 2  # scores alone: half of a pair's FLOPs
        # all pairs are scored without a backward pass; the indexer's loss has one, over the chosen
        return [(attention + 2 * index / 3, layer.topk - 1), (index / 3, -1)]
    if isinstance(layer, MixtureOfBlockAttention):
        mean_keys = layer.num_kv_heads * layer.widths[0] / layer.num_heads / 2 / layer.block
        return [(layer.widths[0], layer.topk * layer.block - 1), (mean_keys / 3, -1)]
    if isinstance(layer, MultiheadLatentAttention):
        return [(layer.num_heads * (sum(layer.q_widths) + layer.v_up.shape[1]) / 2, -1)]
    if isinstance(layer, NativeSparseAttention):
        width, sizes = layer.widths[0], layer.sizes
        chosen = sizes["topk"] * sizes["block"] - 1
        return [(width / sizes["stride"], -1), (width, chosen), (width, sizes["window"])]
    return []


def _state(config: HybridConfig, name: str) -> float:
    """``c · H K V`` of a kind of layer, from the state that one token leaves."""
    if LAYERS[name].state_type is KVCache:
        return 0.0
    with torch.no_grad(), torch.device("cpu"):
        kind: Any = LAYERS[name]  # each takes its own keywords
        layer = kind(config.dim, config.num_heads, **config.options.get(name, {}))
        state = layer(torch.zeros(1, 1, config.dim), output_state=True).state
    return float(STATE_FLOPS.get(name, 4) * state.recurrent.numel())


@dataclass(frozen=True)
class Work:
    """What a document costs: ``token`` a token and ``pair`` a query and key that see each other, in any unit."""

    token: float = 1.0
    pair: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("token", self.token), ("pair", self.pair)):
            check_least(name, value)

    def __call__(self, length: int) -> float:
        """Of one causal document."""
        return self.token * length + self.pair * pairs(length)


def pairs(length: int, window: int = -1) -> int:
    """Keys the queries of one causal document see, all together; `window` earlier ones at most (−1: all)."""
    near = length if window < 0 else min(length, window + 1)
    return near * (near + 1) // 2 + (length - near) * near


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOPs a second of this device; None if it is not in the table."""
    if not isinstance(device, torch.device):
        raise ArgumentError("device", "a torch.device", describe_tensor(device))
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name.replace("-", " ").split()), None)
