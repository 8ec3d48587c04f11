"""``ring-la plan``: rates from a benchmark's file, links as cost models, what a model asks, and sums of all that."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ring_la.cli import choosing, chosen_keys, plan, prediction, rates
from ring_la.cli.cluster import Cluster
from ring_la.cli.main import main
from ring_la.cli.rates import DEVICES, H200, SHEETS, Rates
from ring_la.cli.transformers_work import of_folder
from ring_la.cli.workload import RECURRENCES, Workload
from ring_la.errors import ArgumentError, UnsupportedError
from ring_la.layout import Layout
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS, Attention
from ring_la.scan import Chain, CostModel
from ring_la.scan.auto import Line
from ring_la.training.flops import pairs
from tests.support.train_example import example

UNRATED = ("nsa", "moba")

ROOT = Path(__file__).parents[2]
NEAR, FAR = Line(1e-5, 3e11), Line(2e-5, 4.5e10)
CLUSTER = Cluster(8, NEAR, FAR, post=0.0, launch=0.0)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


def config(*layers: str, **more) -> HybridConfig:
    return HybridConfig(vocab_size=64, dim=32, layers=layers, num_heads=2, **more)


def setting(*layers: str, length: int = 4096, **more) -> prediction.Setting:
    return prediction.Setting(Workload.of(config(*layers)), H200, CLUSTER, length, memory=H200.memory, **more)


def written(tmp_path, **changes) -> Rates:
    """Rates read back from a file as the benchmark writes it."""
    rows = [
        dict(op="gla", gates="trained", T=T, what=what, mode="eager", ms={"local": ms})
        for what, times in (("forward", {1000: 1.0, 2000: 1.5}), ("forward+backward", {1000: 4.0}))
        for T, ms in times.items()
    ]
    speeds = dict(matmul=1e12, copy=1e11, attention_forward=5e11, attention_backward=4e11)
    line = [1e-5, 1e9]
    model = dict(hop=line, swap=line, gather=line, exchange=line, add=line, matmul=line, post=1e-6, launch=0.0)
    machine = dict(device="d", torch="t", dtype="bfloat16", heads=4, width=64)
    path = tmp_path / "bench_scan.json"
    path.write_text(json.dumps(dict(machine=machine, speeds=speeds, groups={"4": model}, rows=rows) | changes))
    return Rates.read(path)


def test_rates_from_a_file(tmp_path):
    rates = written(tmp_path)
    assert rates.recurrence("gla", 8000, 64, 64, backward=False) == pytest.approx(1.5e-3)
    assert rates.recurrence("gla", 16000, 64, 64, backward=False) == pytest.approx(2.5e-3), "the line goes on"
    assert rates.recurrence("gla", 8000, 64, 64, backward=True) == pytest.approx(8e-3), "one point: through the origin"
    assert rates.recurrence("gla", 4000, 64, 128, backward=True) == pytest.approx(8e-3), "work grows with K·V"
    assert rates.groups[4] == CostModel(*[Line(1e-5, 1e9)] * 6, post=1e-6)
    with pytest.raises(ArgumentError, match="figures for kda"):
        rates.recurrence("kda", 1, 64, 64, False)
    with pytest.raises(ArgumentError, match=r"--rates: expected a bench_scan.json"):
        written(tmp_path, speeds={})


def test_a_group_over_hosts_mixes_near_and_far_links():
    inside, across = CLUSTER.model(8, H200), CLUSTER.model(16, H200)
    assert inside.hop == inside.swap == NEAR
    assert across.hop.alpha == pytest.approx((14 * 1e-5 + 2e-5) / 15)
    assert across.hop.beta == pytest.approx(15 / (14 / 3e11 + 1 / 4.5e10))
    assert across.swap == FAR
    assert across.gather.beta == pytest.approx(3e11), "eight links of 45 GB/s carry a node's share"
    assert CLUSTER.model(1024, H200).exchange.beta == pytest.approx(4.5e10 * 1023 / 1016)
    measured = CostModel(*[Line(1.0, 1.0)] * 6, post=1.0)
    known = replace(H200, groups={4: measured})
    assert Cluster(8, NEAR, FAR).model(4, known) == measured
    assert CLUSTER.model(4, known) == replace(measured, post=0.0), "graphs: the host launches nothing"
    assert CLUSTER.model(8, known).hop == NEAR, "another size is composed of links"


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in UNRATED])
def test_a_layer_s_parameters_and_work_are_counted(name):
    work = Workload.of(config(name, name))
    model = HybridLM(config(name, name))
    assert work.parameters == sum(p.numel() for p in model.parameters())
    block = work.blocks[0]
    assert 0 < block.multiplied <= block.parameters
    assert block.saved > 4 * 32
    if issubclass(LAYERS[name], Attention):
        assert (block.recurrence, block.heads, block.K, block.kv) == ("", 2, 16, 2 * 2 * 32)
    elif name in ("mla", "dsa"):
        assert (block.recurrence, block.heads, block.K, block.kv) == ("", 2, 20, 2 * (64 + 8))
    else:
        state = model.blocks[0].layer(torch.randn(1, 2, 32), output_state=True).state.recurrent
        assert block.state.b.shape == state.shape
        assert block.recurrence == RECURRENCES[name]


@pytest.mark.parametrize("name", UNRATED)
def test_a_layer_without_a_rate_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"^layers: "):
        Workload.of(config(name))


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


def test_a_token_goes_once_to_a_rank_of_its_experts():
    one = setting("attention")
    row = 2 * one.work.dim
    block = replace(one.work.blocks[0], routed=8 * row)
    assert prediction.sent(one, block, 1) == 0
    assert prediction.sent(one, block, 2) == pytest.approx(row * (1 - 1 / 256))
    assert prediction.sent(one, block, 4) == pytest.approx(2.70 * row, rel=1e-3)


def test_experts_count_by_the_active_ones():
    moe = config("gla", mlp="moe", mlp_dim=32, mlp_options=dict(experts=8, top_k=2))
    block = Workload.of(moe).blocks[0]
    all_experts = 8 * 3 * 32 * 32
    assert block.parameters - block.multiplied >= all_experts * 6 / 8
    assert block.multiplied > all_experts * 2 / 8
    assert block.met == all_experts * 2 / 8


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


def test_what_is_kept_is_what_the_fused_operators_keep():
    """bf16, a token: inputs of products, convolution, norms and recurrence; no intermediate in fp32."""
    block, D = Workload.of(config("gdn")).blocks[0], 32
    hidden = HybridLM(config("gdn")).blocks[0].mlp.out_proj.in_features
    assert block.norm_saved == 2 * D
    assert block.mlp_saved <= 2 * (D + 5 * hidden)
    assert 2 * 8 * D < block.layer_saved < 2 * 20 * D


def test_the_command_prints_and_saves_its_table(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(config("gla", "attention").to_dict()))
    plan.run(options("--config", str(file), "--length", "8192", "--gpus", "4,16", "--out", str(tmp_path / "t.json")))
    out = capsys.readouterr().out
    assert out.count("<- best") == 2
    assert H200.source in out
    table = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["gpus"], row["P"]) for row in table] == [(4, p) for p in (1, 2, 4)] + [
        (16, p) for p in (1, 2, 4, 8, 16)
    ]
    plan.run(options("--config", str(file), "--length", "8192", "--memory", "0.001"))
    assert "no split fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "8,no"), "--gpus: expected numbers"),
        (("--inside", "10"), "--inside: expected latency"),
        (("--between", "10,-3"), "--between: expected latency"),
        (("--length", "0"), "--length: expected a number"),
        (("--memory", "-3"), "--memory: expected GiB"),
        (("--recompute", "gdn,banana"), "--recompute: expected block, mlp, norm or names"),
        (("--rounds", "0"), "--rounds: expected a number"),
        (("--layers", "banana"), "layers: expected names out of"),
        (("--config", "/nonexistent.json"), "--config: expected JSON of a HybridConfig"),
        (("--rates", "/nonexistent.json"), "--rates: expected a bench_scan.json"),
        (("--write", "plan.yaml"), "--write: expected --choose beside it"),
        (("--inside", "10,inf"), "--inside: expected latency"),
        (("--between", "nan,300"), "--between: expected latency"),
        (("--host-memory", "nan", "--offload"), "--host-memory: expected GiB"),
        (("--rounds", "9", "--length", "8"), "--rounds: expected at most --length 8"),
        (("--config", "a.json", "--transformers", "b"), "--config: expected none beside --transformers"),
        (("--rounds", "2", "--layout", "contiguous"), "--layout: expected zigzag"),
        (("--out", "/"), "--out: expected a file"),
        (("--choose", "--force", "--write", "/"), "--write: expected a file"),
        (("--spread-experts",), "--spread-experts: expected --transformers beside it"),
        (("--forward", "--offload"), "--offload: expected none with --forward"),
        (("--forward", "--recompute"), "--recompute: expected none with --forward"),
        (("--forward", "--mlp-chunk", "64"), "--mlp-chunk: expected none with --forward"),
        (("--keep-attention",), "--keep-attention: expected --recompute beside it"),
        (("--host-memory", "64"), "--host-memory: expected --offload or --choose beside it"),
        (("--choose", "--force"), "--force: expected --write beside it"),
        (("--choose", "--recompute"), "--recompute: expected none with --choose, which chooses it"),
        (("--choose", "--offload"), "--offload: expected none with --choose"),
        (("--recompute", ","), "--recompute: expected block, mlp, norm or names"),
    ],
)
def test_bad_options_are_named_before_anything_is_printed(words, message, capsys):
    with pytest.raises(ArgumentError, match=message):
        plan.run(options("--layers", "gla", "--repeat", "1", "--dim", "32", "--heads", "2", *words))
    assert not capsys.readouterr().out, "nothing is printed before all options are read"


def test_a_configuration_that_makes_no_model_is_refused(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": -5}')
    with pytest.raises(ArgumentError, match="--transformers: expected a folder with a causal model's config"):
        plan.run(options("--transformers", str(tmp_path)))


def test_a_choice_is_written_with_the_model_and_what_it_fits_with(tmp_path):
    jsonargparse = pytest.importorskip("jsonargparse")
    file, chosen = tmp_path / "model.json", tmp_path / "plan.yaml"
    file.write_text(json.dumps(config("gdn", "gla", mlp_dim=48).to_dict()))
    words = ("--config", str(file), "--length", "8192", "--gpus", "2", "--rounds", "4", "--loss-chunk", "512")
    plan.run(options(*words, "--choose", "--write", str(chosen)))
    read = jsonargparse.auto_cli(example().Config, args=["--config", str(chosen)], as_positional=False)
    assert (read.model.layers, read.model.dim, read.model.mlp_dim) == (["gdn", "gla"], 32, 48)
    assert (read.memory.rounds, read.memory.loss_chunk, read.parallel.layout) == (4, 512, "zigzag")


def test_windows_are_neither_computed_nor_sent_beyond():
    """As many pairs as a window shows, and as many keys as it needs from other ranks."""
    base = setting("attention", length=1 << 20)
    short = Workload.of(config("attention", options={"attention": {"window": 4095}}))
    whole, near = (prediction.predict(replace(base, work=work), 8, 8) for work in (base.work, short))
    assert near.seconds < 0.02 * whole.seconds


def test_windows_of_transformers_are_seen(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    few = {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16, "sliding_window": 8}
    transformers.Gemma3TextConfig(**shape, **few, layer_types=["sliding_attention", "full_attention"]).save_pretrained(
        tmp_path / "gemma"
    )
    transformers.MistralConfig(**shape, **few).save_pretrained(tmp_path / "mistral")
    windows = {name: [b.window for b in of_folder(tmp_path / name).blocks] for name in ("gemma", "mistral")}
    assert windows == {"gemma": [7, -1], "mistral": [7, 7]}
    transformers.RecurrentGemmaConfig(**shape, num_hidden_layers=3, vocab_size=64).save_pretrained(tmp_path / "rglru")
    with pytest.raises(UnsupportedError, match="got RecurrentGemmaRecurrentBlock"):
        of_folder(tmp_path / "rglru")


def test_columns_stay_apart(capsys):
    """A million tokens on one GPU take a hundred thousand ms a step."""
    words = ("--layers", "gdn,attention", "--dim", "2048", "--length", "1048576", "--gpus", "1,8", "--forward")
    plan.run(options(*words, "--repeat", "64"))
    _, _, head, *rows = capsys.readouterr().out.splitlines()
    ends = [found.end() for found in re.finditer(r"\S+", head)]
    lines = [row for row in rows if " ms" in row]
    assert len(lines) == 1 + 4
    for row in lines:
        assert re.match(r"( {2,}[\d.]+){3}( {2,}[\d.]+ ms){5} {2,}[\d.]+ GiB {2,}\d+(  |$)", row), row
        assert [row[end - 1].isspace() for end in ends] == [False] * len(ends), "a figure ends where its name does"


PAGES = [ROOT / "docs/users/guides/planning.md", ROOT / "ring_la/cli/plan.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_work_as_typed(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = page.read_text().replace("\\\n", "")
    commands = re.findall(r"^ {4}(?:\$ )?ring-la plan (--.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        plan.run(options(*shlex.split(command)))
        assert "<- best" in capsys.readouterr().out, command


def test_a_model_of_transformers_is_planned_and_its_choice_applies(tmp_path, capsys):
    """Qwen3.5-35B-A3B's shape: parameters and those a token meets, what fits, and a file that the script takes."""
    transformers = pytest.importorskip("transformers")
    jsonargparse = pytest.importorskip("jsonargparse")
    transformers.Qwen3_5MoeTextConfig().save_pretrained(tmp_path / "model")
    work = of_folder(tmp_path / "model")
    assert work.parameters == pytest.approx(34.7e9, rel=0.01)
    assert work.ends + sum(b.multiplied for b in work.blocks) == pytest.approx(3.5e9, rel=0.1)
    assert [b.recurrence for b in work.blocks[:4]] == ["gated_delta_rule"] * 3 + [""]
    words = ["--transformers", str(tmp_path / "model"), "--length", "262144", "--gpus", "1,4", "--per-node", "4"]
    words += ["--parameters", "bfloat16", "--choose", "--write", str(tmp_path / "plan.yaml")]
    plan.run(options(*words))
    said = capsys.readouterr().out
    assert "1 GPUs: does not fit 139 GiB with any choice" in said
    assert re.search(r"4 GPUs: fits, [\d.]+ GiB, [\d.]+ s a step on P = \d", said)
    script = example()
    config = jsonargparse.auto_cli(script.Config, args=["--config", str(tmp_path / "plan.yaml")], as_positional=False)
    assert config.memory.parameters == "bfloat16"
    assert config.parallel.context * config.parallel.fsdp == 4
    assert config.model.transformers == str(tmp_path / "model")
    with pytest.raises(ArgumentError, match=r"--write: expected a new file, or --force, got .*plan.yaml, which exists"):
        plan.run(options(*words))


def test_a_mixture_is_offered_what_training_takes(tmp_path):
    """Tiles of a HybridLM's mixtures are refused there, and its experts are on every rank."""
    moe = config("gla", mlp="moe", mlp_dim=32, mlp_options=dict(experts=8, top_k=2))
    one = prediction.Setting(Workload.of(moe), H200, CLUSTER, 4096, memory=H200.memory)
    assert {(s.spread, s.mlp_chunk) for s in choosing.settings(one)} == {(False, None)}
    (tmp_path / "moe.json").write_text(json.dumps(moe.to_dict()))
    words = ["--config", str(tmp_path / "moe.json"), "--mlp-chunk", "64"]
    with pytest.raises(ArgumentError, match="--mlp-chunk: expected none with a mixture of experts"):
        plan.run(options(*words))


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


def test_devices_by_their_data_sheets_are_marked(capsys):
    """What nobody measured says so; no device is faster than its sheet."""
    for name, device in DEVICES.items():
        assert device.matmul < SHEETS[name].matmul
        assert device.copy < SHEETS[name].copy
        assert ("NOT MEASURED" in device.source) == (name != "H200")
    assert (
        main(["plan", "--layers", "gdn", "--repeat", "1", "--length", "8192", "--gpus", "8", "--device", "A100"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        "rates: NOT MEASURED: an H200's, scaled by the data sheet of an NVIDIA A100 SXM 80 GB (312 TFLOP/s bf16" in out
    )
