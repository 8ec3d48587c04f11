"""Seconds and bytes of a step as ``ring-la plan`` adds them up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_la.cli import chosen_keys, prediction, rates
from ring_la.cli.rates import H200
from ring_la.cli.workload import Workload
from ring_la.layout import Layout
from ring_la.models import HybridConfig
from ring_la.scan import Chain
from ring_la.scan.auto import Line
from ring_la.training.flops import pairs
from tests.cli.plans import CLUSTER, config, setting


def test_a_step_is_the_sum_of_its_parts():
    one = setting("gla", length=65536)
    block = one.work.blocks[0]
    alone = prediction.predict(one, 1, 1)
    assert (alone.exchange, alone.attention, alone.weights, alone.strategies) == (0.0, 0.0, 0.0, {})
    matmuls = 6 * 65536 * (block.multiplied + one.work.head) / H200.matmul
    mixing = H200.recurrence("gla", 65536 * block.heads, block.K, block.V, True)
    updated = (6 * 4 + 2 * 8) * one.work.parameters / prediction.UPDATE  # fp32: clipping and AdamW
    moved = (prediction.PASSES * block.saved + prediction.LOGIT * one.work.vocabulary) * 65536 + updated
    assert alone.seconds == pytest.approx(matmuls + mixing + moved / H200.copy)
    split = prediction.predict(one, 8, 8)
    assert split.compute == pytest.approx(alone.compute / 8)
    by_name = CLUSTER.model(8, H200).predict(Chain.of(Layout(65536, "zigzag", 8, 0)), block.state, True)
    assert split.exchange == pytest.approx(min(by_name.values()))
    assert split.strategies == {"gla": min(by_name, key=by_name.get)}
    assert split.memory < alone.memory
    assert prediction.predict(replace(one, backward=False), 8, 8).exchange < 0.6 * split.exchange


def test_attention_moves_keys_where_compute_does_not_hide_it():
    both = setting("attention", length=1 << 20)
    assert prediction.predict(both, 8, 8).attention == 0.0, "a long sequence computes longer than its keys travel"
    slow = replace(both, cluster=replace(CLUSTER, per_node=1, between=Line(1e-3, 1e8)), length=1 << 14)
    assert prediction.predict(slow, 8, 8).attention > 0.0


def test_windows_are_neither_computed_nor_sent_beyond():
    """As many pairs as a window shows, and as many keys as it needs from other ranks."""
    base = setting("attention", length=1 << 20)
    short = Workload.of(config("attention", options={"attention": {"window": 4095}}))
    whole, near = (prediction.predict(replace(base, work=work), 8, 8) for work in (base.work, short))
    assert near.seconds < 0.02 * whole.seconds


def test_a_token_goes_once_to_a_rank_of_its_experts():
    one = setting("attention")
    row = 2 * one.work.dim
    block = replace(one.work.blocks[0], routed=8 * row)
    assert prediction.sent(one, block, 1) == 0
    assert prediction.sent(one, block, 2) == pytest.approx(row * (1 - 1 / 256))
    assert prediction.sent(one, block, 4) == pytest.approx(2.70 * row, rel=1e-3)


def test_more_gpus_take_less_time_and_memory_each():
    big = setting("gla", "attention", length=1 << 22)
    for gpus in (8, 512, 4096):
        lines = [prediction.predict(big, gpus, P) for P in prediction.splits(gpus, big.length)]
        assert [line.P for line in lines][-1] == gpus
        assert all(a.compute > b.compute and a.memory > b.memory for a, b in zip(lines, lines[1:]))
        assert all(line.seconds > 0 and line.throughput > 0 for line in lines)
    assert prediction.splits(6, 4096) == [1, 2, 6]
    assert prediction.splits(1024, 256) == [1, 2, 4]


def test_recomputing_trades_time_for_memory():
    ways = {"": (), "mlp": ("mlp",), "layer": ("gla", "norm"), "both": ("gla", "mlp"), "block": ("block",)}
    found = {n: prediction.predict(setting(*["gla"] * 32, recompute=names), 8, 2) for n, names in ways.items()}
    assert found[""].memory > found["layer"].memory > found["both"].memory > found["block"].memory
    assert found[""].memory > found["mlp"].memory
    assert found[""].compute < found["mlp"].compute < found["both"].compute
    assert found["both"].compute == pytest.approx(found["block"].compute)
    other = prediction.predict(setting(*["gla"] * 32, recompute=("gdn",)), 8, 2)
    assert other.memory == found[""].memory, "a layer the model has not"


def test_chunks_and_rounds_trade_memory_alone():
    whole = setting("gla", "gla", recompute=("block",), length=1 << 20)
    chunked, rounds = replace(whole, mlp_chunk=4096), replace(whole, rounds=8)
    assert prediction.predict(chunked, 8, 2).memory < prediction.predict(whole, 8, 2).memory
    assert prediction.predict(rounds, 8, 2).memory < prediction.predict(whole, 8, 2).memory
    assert (
        prediction.predict(chunked, 8, 2).seconds
        == prediction.predict(rounds, 8, 2).seconds
        == prediction.predict(whole, 8, 2).seconds
    )


def test_memory_of_states_host_and_spread_experts():
    """16 bytes a parameter, or as few as 5; what lies in host memory does not count, but the way there does."""
    base = setting("gdn", length=65536)
    assert base.state_bytes == 16
    assert replace(base, parameters="bfloat16", optimizer="adamw4bit").state_bytes == 5
    kept, away = prediction.predict(base, 1, 1), prediction.predict(replace(base, offload=True), 1, 1)
    assert away.memory <= kept.memory
    assert away.seconds >= kept.seconds
    assert not prediction.predict(replace(base, offload=True, host_memory=1.0), 1, 1).fits
    again = setting(*["attention"] * 8, length=65536, recompute=("block",))
    twice, once = (prediction.predict(replace(again, keep_attention=keep), 1, 1) for keep in (False, True))
    heads = again.work.blocks[0].heads
    assert once.memory - twice.memory == pytest.approx(8 * 65536 * heads * (2 * again.work.blocks[0].V + 4))
    assert once.seconds < 0.85 * twice.seconds


def test_mailboxes_hold_others_keys_and_gradients_where_ranks_share_a_host():
    def boxes(name: str, tokens: float, P: int, **more) -> float:
        one = setting(name, length=int(tokens * P), **more)
        return prediction.mailboxes(one, one.work.blocks[0], tokens, P)

    kv = setting("attention").work.blocks[0].kv
    assert boxes("attention", 1024, 4) == 1.5 * 3 * kv * 1024
    assert boxes("attention", 1024, 4, backward=False) == 3 * kv * 1024
    few = replace(setting("dsa", length=4096).work.blocks[0], chosen=1)  # which a ring sends
    assert prediction.mailboxes(setting("dsa", length=4096), few, 1024, 4) == 2.5 * 3 * few.kv * 1024, (
        "gradients are fp32"
    )
    assert boxes("gdn", 1024, 4) == boxes("attention", 1024, 1) == boxes("attention", 1024, 16) == 0
    split = prediction.predict(setting("attention", length=4096), 4, 4)
    assert split.mailboxes == boxes("attention", 1024, 4) < split.memory


def test_chosen_keys_cost_by_tokens_and_their_index_by_pairs():
    """At a million tokens reading is linear, the index quadratic, and its loss is of training alone."""
    options = dict(dsa=dict(topk=2048, index_heads=4, index_dim=128))
    work = Workload.of(HybridConfig(64, 2048, ["dsa"], num_heads=16, options=options))
    block = work.blocks[0]
    assert (block.chosen, block.indexed) == (2048, (4, 128))
    assert block.saved >= 4 * 2048, "the choice is kept"
    times = [
        [prediction.attended(prediction.Setting(work, H200, CLUSTER, T), block, T, way) for way in (False, True)]
        for T in (2**19, 2**20)
    ]
    scores = [2 * pairs(T) * 4 * 128 / rates.INDEX for T in (2**19, 2**20)]
    for way in range(2):
        linear = [times[i][way] - scores[i] for i in range(2)]
        assert linear[1] == pytest.approx(2 * linear[0], rel=0.01)
    assert times[1][1] > 3 * (times[1][0] - scores[1]) + scores[1]


def test_chosen_keys_on_several_ranks_take_more_than_their_share():
    """As the four ranks of benchmarks/results/sparse-h200x4.json, which give two of the rates."""
    T, options = 2**20, dict(dsa=dict(topk=2048, index_heads=4, index_dim=128, head_dim=128, rope_dim=64))
    block = Workload.of(HybridConfig(64, 2048, ["dsa"], num_heads=16, options=options)).blocks[0]
    keys, width = T / 4 * pairs(T, block.chosen - 1) / T, block.kv / 2
    assert H200.chosen(keys, width, 16, True) == pytest.approx(1.604, rel=0.03)
    assert H200.chosen(keys, width, 16, True, 3) == pytest.approx(2.331, rel=0.03)
    assert H200.index(T / 4, pairs(T) / T, *block.indexed) == pytest.approx(1.108, rel=0.03)
    assert H200.index(2**17, pairs(2**17) / 2**17, *block.indexed) == pytest.approx(0.105, rel=0.03)


def test_chosen_latents_are_gathered_where_calls_gather_them():
    """On one host while they are little beside what queries hold; over several always."""
    T, options = 2**20, dict(dsa=dict(topk=2048, index_heads=4, index_dim=128, head_dim=128, rope_dim=64))
    work = Workload.of(HybridConfig(64, 2048, ["dsa"], num_heads=16, options=options))
    (block,) = work.blocks
    assert [chosen_keys.rounds(block, T, P, 16) for P in (1, 2, 4, 8, 16, 32)] == [1, 1, 1, 1, 6, 1]
    assert [chosen_keys.rounds(replace(block, chosen=8), T, P, 8) for P in (2, 4)] == [2, 3]  # soon gone through
    model, others = CLUSTER.model(4, H200), 3 / 4 * T * block.kv
    took = chosen_keys.gathering(model, block, T, 4, True)
    assert took == 2 * model.gather(others) + model.exchange(2 * others)
    one = prediction.Setting(work, H200, replace(CLUSTER, per_node=16), T, memory=H200.memory)
    four, ring = (prediction.predict(one, P, P) for P in (4, 16))
    assert (four.attention, four.mailboxes) == (took, 0)
    assert ring.mailboxes == prediction.mailboxes(one, block, T / 16, 16) > 0
    assert four.memory == prediction.held(one, 4, T / 4) + 3 * T * block.kv
