"""Models under ``deterministic=True``, and what differs of two runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.models import HybridConfig, HybridLM

LAYERS = ["gdn", "kda", "mamba2", "rwkv7", "gla", "attention"]
PACKED = (0, 70, 71, 170)
OTHERS = ["linear_attention", "retention", "lightning", "hgrn2", "deltanet", "comba", "gdn2", "gated_delta_product"]
OTHERS += ["hgrn", "rwkv6", "gsa", "mla", "mlstm", "mamba3", "fox", "ttt", "preconditioned_gdn", "preconditioned_kda"]
OTHERS += ["momentum_deltanet", "mesa_net", "lightnet", "abc"]


def model(layers: list[str] = LAYERS) -> HybridLM:
    torch.manual_seed(0)
    options = {"mamba2": dict(state_dim=16), "attention": dict(num_kv_heads=1, qk_norm=True, gated=True)}
    options |= {
        "hgrn": dict(lower_bound=0.2),
        "gsa": dict(slots=5),
        "abc": dict(slots=5),
        "lightnet": dict(key_dim=5, gate_rank=3),
        "mesa_net": dict(steps=3),
        "mla": dict(q_rank=12, value_dim=5),
        "mamba3": dict(state_dim=16),
    }
    options = {name: o for name, o in options.items() if name in layers}
    # 3 heads and 33 channels: rows of which vector registers are not multiples
    m = HybridLM(HybridConfig(50, 48, layers, 3, mlp_dim=33, options=options))
    with torch.no_grad():
        for p in m.parameters():  # some start at zero, and others' gradients with them
            p += 0.02 * torch.randn(p.shape)
    return m


def tokens(*lengths: int, seed: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=rng) for n in lengths]


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [n for n in one | other if not torch.equal(one[n], other[n])]
