"""`bench attention`: the table of docs/users/benchmarks.md from the figures beside it, and flash_attn lent to peers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

import pytest

from benchmarks.peers import flash_attn
from ring_la.cli.main import main


def test_a_saved_run_is_read_as_a_table(tmp_path, capsys):
    row = dict(case="causal", T=4096, name="ring_la ring cudnn", forward=1.294, share_forward=0.724, total=4.5)
    row |= dict(
        share_total=0.76, peak=0.691, row_forward=1.1, share_row_forward=0.8, row_total=4.4, share_row_total=0.7
    )
    (tmp_path / "a.json").write_text(json.dumps(dict(rows=[row])))
    assert not main(["bench", "attention", "--read", str(tmp_path / "a.json")])
    head, rule, line = capsys.readouterr().out.splitlines()
    assert line == "| causal | 4,096 | ring cudnn | 1.29 | 72% | 4.50 | 76% | 1.10, 4.40 (80%, 70%) |  | 0.69 |"
    assert head.count("|") == rule.count("|") == line.count("|")


def test_a_file_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["bench", "attention", "--read", str(tmp_path / "absent.json")]) != 0
    assert "read: expected what an earlier --out wrote, got" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_is_lent_while_peers_are_imported():
    before = set(sys.modules)
    with flash_attn.flash_attn():
        lent = importlib.import_module("flash_attn.flash_attn_interface")
        assert lent._flash_attn_varlen_forward is flash_attn._varlen_forward
    with pytest.raises(ImportError, match="not to be had"), flash_attn.flash_attn():
        raise ImportError("not to be had")
    assert not {name for name in set(sys.modules) - before if "flash_attn" in name}
    assert importlib.util.find_spec("flash_attn") is None
