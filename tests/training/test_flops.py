"""FLOPs against sums made by hand."""

from __future__ import annotations

import pytest

from ring_la import ArgumentError
from ring_la.models import HybridConfig
from ring_la.training import StepFlops, Work, peak_flops
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


def test_chosen_keys_count_as_far_as_a_token_reads_them():
    """DSA: attention to the chosen, forward and back; scores of all pairs forward, of the chosen ones back, too."""
    D, H, Hi, K = 16, 2, 3, 8
    widths = {"head_dim": 8, "rope_dim": 4, "value_dim": 6, "kv_rank": 10}
    sparse = StepFlops(
        HybridConfig(19, D, ["dsa"], H, options={"dsa": widths | {"topk": 5, "index_heads": Hi, "index_dim": K}})
    )
    dense = StepFlops(HybridConfig(19, D, ["mla"], H, options={"mla": widths}))
    index = 2 * (D * Hi * K + D * K + D * Hi)  # its maps, a token
    assert sparse.per_token == dense.per_token + index
    chosen, scores = pairs(20, 4), 2 * Hi * K
    by_pair = 2 * H * (8 + 4 + 6)
    assert abs(dense([0, 20]) - 3 * (20 * dense.per_token + pairs(20) * by_pair)) < 1e-3
    by_hand = 3 * (20 * sparse.per_token + chosen * by_pair) + pairs(20) * scores + 2 * chosen * scores
    assert abs(sparse([0, 20]) - by_hand) < 1e-3
    moba = StepFlops(HybridConfig(19, D, ["moba"], H, options={"moba": {"block": 4, "topk": 2}}))
    means = pairs(20) / 4 * 2 * D  # of each block's mean key and the queries of a key head together
    assert abs(moba([0, 20]) - 3 * (20 * moba.per_token + pairs(20, 7) * 4 * D) - means) < 1e-3


def test_experts_count_as_far_as_a_token_uses_them():
    moe = {"mlp": "moe", "mlp_options": {"experts": 8, "top_k": 2}}
    few = StepFlops(HybridConfig(19, 16, ["gdn"], 2, mlp_dim=32, **moe))
    dense = StepFlops(HybridConfig(19, 16, ["gdn"], 2, mlp_dim=64))
    assert few.per_token == dense.per_token + 2 * 8 * 16  # the router


@pytest.mark.parametrize("wrong", [{"token": -1.0}, {"token": "x"}, {"pair": None}, {"pair": float("nan")}])
def test_work_that_is_none_is_named(wrong):
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: expected"):
        Work(**wrong)
    with pytest.raises(ArgumentError, match=r"^device: expected a torch\.device, got 'cuda'"):
        peak_flops("cuda")
