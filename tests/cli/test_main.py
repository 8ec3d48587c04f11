"""The command line: every command answers --help, an unknown one and a bad argument end with status 2."""

from __future__ import annotations

import pytest
import torch

from ring_la.cli.main import COMMANDS, main
from ring_la.errors import ArgumentError


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert f"ring-la {' '.join(command)}" in capsys.readouterr().out


def test_overview(capsys):
    assert main([]) == main(["bench"]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(" ".join(c)) == 3 for c in COMMANDS)


def test_unknown_command(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "bench nothing" in capsys.readouterr().err


def test_bad_argument(capsys, monkeypatch):
    def refuse(_):
        raise ArgumentError("ops", "known names", "banana")

    monkeypatch.setattr("ring_la.cli.bench_ops.run", refuse)
    assert main(["bench", "ops"]) == 2
    assert "ring-la bench ops: ops: expected known names, got banana" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench ops --jobs 0", "--jobs: expected a number ≥ 1, got '0'"),
        ("bench attention --lengths 64,none", "--lengths: expected a number ≥ 1, got 'none'"),
        ("bench attention --cases causal,moon", "--cases: expected names out of causal, gqa 32:8,"),
        ("doctor --width -1", "--width: expected a number ≥ 1, got '-1'"),
    ],
)
def test_bad_option(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU could do it")
def test_bench_attention_without_ranks(capsys):
    assert main(["bench", "attention"]) == 2
    assert "ranks: expected some that torchrun started" in capsys.readouterr().err
