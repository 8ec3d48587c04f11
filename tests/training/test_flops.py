"""FLOPs against sums made by hand."""

from __future__ import annotations

from ring_la.models import HybridConfig
from ring_la.training import StepFlops
from ring_la.training.flops import pairs


def test_pairs_are_those_a_mask_shows():
    for n in (1, 5, 9):
        for window in (-1, 0, 2, 20):
            seen = sum(1 for i in range(n) for j in range(i + 1) if window < 0 or i - j <= window)
            assert pairs(n, window) == seen


def test_a_hybrid_by_hand():
    D, M, V = 16, 64, 19
    config = HybridConfig(V, D, ["attention", "linear_attention"], 2, mlp_dim=M)
    mlps, head = 2 * 3 * D * M, V * D
    layers = 2 * 4 * D * D  # q, k, v and out of both
    state = 2 * (D // 2) * (D // 2 + 1)  # one more column, the normaliser
    by_token = 2 * (mlps + head + layers) + 4 * state
    flops = StepFlops(config)
    assert flops([0, 3, 10]) == 3 * (10 * by_token + 4 * D * (6 + 28))
    assert flops.parameters == mlps + head + layers + 5 * D  # and the norms'


def test_experts_count_as_far_as_a_token_uses_them():
    moe = {"mlp": "moe", "mlp_options": {"experts": 8, "top_k": 2}}
    few = StepFlops(HybridConfig(19, 16, ["gdn"], 2, mlp_dim=32, **moe))
    dense = StepFlops(HybridConfig(19, 16, ["gdn"], 2, mlp_dim=64))
    assert few.per_token == dense.per_token + 2 * 8 * 16  # the router
