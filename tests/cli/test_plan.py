"""``ring-la plan``, the command: its table, options that are refused, choices that are written."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from ring_la.cli import choosing, plan, prediction
from ring_la.cli.rates import H200
from ring_la.cli.transformers_work import of_folder
from ring_la.cli.workload import Workload
from ring_la.errors import ArgumentError
from tests.cli.plans import CLUSTER, ROOT, config, options
from tests.support.train_example import example


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
