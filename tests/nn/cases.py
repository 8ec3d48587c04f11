"""Small layers of every kind, with nothing left at zero."""

from __future__ import annotations

import torch

from ring_la.nn import LAYERS, KVCache, Layer

DIM = 16
# many heads of an indexer: tokens whose score is 0 in all of them are chosen among by chance
OPTIONS = {
    "attention": {"num_kv_heads": 2, "qk_norm": True, "gated": True},
    "mla": {"q_rank": 12, "value_dim": 3},
    "nsa": {"num_kv_heads": 2, "length": 4, "stride": 2, "block": 4, "topk": 4, "window": 3},
    "dsa": {"topk": 4, "index_heads": 12, "index_dim": 4, "q_rank": 12},
    "moba": {"num_kv_heads": 2, "block": 3, "topk": 2, "qk_norm": True},
    "deltanet": {"negative_eigenvalues": True},
    "gdn": {"num_value_heads": 8, "value_dim": 3},
    "kda": {"lower_bound": -5.0},
    "hgrn2": {"lower_bound": 0.2},
    "mamba2": {"state_dim": 4, "groups": 2},
    "gsa": {"slots": 3},
    "abc": {"slots": 3},
    "log_linear_mamba2": {"state_dim": 4, "groups": 2, "levels": 9},
    "lightnet": {"key_dim": 3, "gate_rank": 2},
    "mesa_net": {"steps": 6},
    "mamba3": {"state_dim": 4, "groups": 2, "rank": 2},
    "rwkv6": {"layer_idx": 1, "num_layers": 3},
    "fox": {"qk_norm": True, "gated": True},
    "lightning": {"layer_idx": 1, "num_layers": 3},
    "rwkv7": {"layer_idx": 1, "num_layers": 3},
    "ttt": {"mini_batch": 3},
}
NAMES = tuple(LAYERS)
RECURRENT = tuple(name for name, kind in LAYERS.items() if kind.state_type is not KVCache)


def make(name: str, dtype: torch.dtype = torch.float64, **options) -> Layer:
    """A layer whose parameters all matter: some are initialised to zero, where a wrong gradient would hide."""
    torch.manual_seed(0)
    layer = LAYERS[name](DIM, 4, **{**OPTIONS.get(name, {}), **options}).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def parts(state) -> list[torch.Tensor]:
    """The float tensors of a layer's state."""
    if isinstance(state, KVCache):
        return [state.k, state.v]
    return [t for t in state if t is not None and t.is_floating_point()]
