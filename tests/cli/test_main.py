"""The command line: every command answers --help, an unknown one and a bad argument end with status 2."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ring_la
from ring_la.cli.main import COMMANDS, _module, main
from ring_la.cli.usage import Help
from ring_la.errors import ArgumentError


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert f"ring-la {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_every_option_is_without_it(command):
    parser = argparse.ArgumentParser(formatter_class=Help)
    _module(command).add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert not action.option_strings or action.help or action.default is not None, action.option_strings
        number = isinstance(action.default, int) and not isinstance(action.default, bool)
        if action.option_strings and number and "default" not in (action.help or ""):
            assert f"default: {action.default}" in shown, action.option_strings


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ring_la {ring_la.__version__}\n"


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == main(["bench"]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(" ".join(c)) == 3 for c in COMMANDS)


def test_an_unknown_command_is_named(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "bench nothing" in capsys.readouterr().err


def test_benchmarks_without_their_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ring_la.cli.bench.CHECKOUT", tmp_path)
    assert main(["bench", "ops", "--help"]) == 2
    said = capsys.readouterr().err
    assert (
        f"ring-la bench ops: ring_la: expected a checkout, with benchmarks/ beside it, got the one in {tmp_path}"
        in said
    )
    assert "Benchmarks run from a checkout: clone ring_la and run there `python -m ring_la bench ops`" in said


def test_benchmarks_are_found_from_anywhere(tmp_path):
    """By a process that finds ring_la alone, as an editable installation may have it."""
    (tmp_path / "ring_la").symlink_to(Path(ring_la.__file__).parent)
    command = [sys.executable, "-m", "ring_la", "bench", "attention", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ring-la bench attention" in done.stdout


def test_an_argument_error_ends_a_command_in_one_line(capsys, monkeypatch):
    def refuse(_):
        raise ArgumentError("ops", "known names", "banana")

    monkeypatch.setattr("benchmarks.ops.bench.run", refuse)
    assert main(["bench", "ops"]) == 2
    assert "ring-la bench ops: ops: expected known names, got banana" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench ops --jobs 0", "--jobs: expected a number ≥ 1, got '0'"),
        ("bench attention --lengths 64,none", "--lengths: expected a number ≥ 1, got 'none'"),
        ("bench attention --cases causal,moon", "--cases: expected names out of causal, full, gqa 32:8,"),
        ("doctor --width -1", "--width: expected a number ≥ 1, got '-1'"),
    ],
)
def test_bad_options_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU could do it")
def test_bench_attention_without_ranks(capsys):
    assert main(["bench", "attention"]) == 2
    assert "ranks: expected some that torchrun started" in capsys.readouterr().err
