"""`bench attention`: the table of docs/users/benchmarks.md from the figures beside it, and flash_attn lent to peers."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import pytest
import torch
import torch.nn.functional as F

import ring_la
from benchmarks.attention import bench
from benchmarks.peers import flash_attn
from ring_la.cli.main import main
from tests.support import pool


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


def test_flash_attn_is_lent_while_peers_are_imported():
    """Its functions run on the kernel that is named, and it is gone afterwards."""
    before = set(sys.modules)
    with flash_attn.flash_attn():
        lent = importlib.import_module("flash_attn.flash_attn_interface")
        assert lent._flash_attn_varlen_forward is flash_attn._varlen_forward
    with pytest.raises(ImportError, match="not to be had"), flash_attn.flash_attn():
        raise ImportError("not to be had")
    assert not {name for name in set(sys.modules) - before if "flash_attn" in name}
    q, k, v, do = (torch.randn(1, 9, 2, 8) for _ in range(4))
    want = [x.clone().requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in want), is_causal=True).transpose(1, 2)
    flash_attn.use("cpu_flash")
    try:
        out, lse, *_ = lent._flash_attn_forward(q, k, v, causal=True)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        lent._flash_attn_backward(do, q, k, v, out, lse, *grads, 0.0, None, True)
    finally:
        flash_attn.use("flash")
    torch.testing.assert_close([out, *grads], [o, *torch.autograd.grad(o, want, do)])


def rows_of(rank: int, kinds: list[str]) -> dict[str, float]:
    """Of a window's rows on CPUs how far each is from the first."""
    how = dict(window=(8, -1))
    case = bench.Case("window 8", 32, pool.SIZE, (2, 2), 16, [0, 32 * pool.SIZE], how, 0.1)
    asked = argparse.Namespace(kinds=kinds, backends=["torch"], strategies=["ring"], streams=["auto"])
    asked.peers_on, asked.graphs = ["none"], False
    drawn = torch.randn(4, 1, 32, 2, 16, generator=torch.Generator().manual_seed(rank)).unbind()
    contexts = {"torch": ring_la.ContextParallel(pool.group(), scan="ring", transport="torch")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.Case, "tensors", lambda self, rank: [*drawn])
        patch.setattr(bench.Case, "bound", lambda self, kernel: kernel)
        patch.setattr(bench, "measure", lambda *timed: {})
        patch.setattr(bench, "peak", lambda call: 0.0)
        return {row["name"]: row["apart"] for row in bench.bench(case, asked, contexts, None, float("inf"))}


def test_every_row_of_a_window_has_the_first_ones_numbers(ranks):
    """Whatever layout each is under: a balanced one that knows the window owns other tokens than one that does not."""
    for rows in ranks.run(pool.SIZE, rows_of, ["balanced", "zigzag"]):
        assert [*rows] == [f"ring_la ring, sent torch {kind}" for kind in ("balanced", "zigzag")]
        assert rows["ring_la ring, sent torch balanced"] == 0.0
        assert rows["ring_la ring, sent torch zigzag"] < 1e-6
