"""The example of one's own module: it learns across the ranks, as it does on one process."""

from __future__ import annotations

from unittest import mock

import pytest

from examples import own_module

STEPS = 20


def on_ranks(rank: int) -> list[float]:
    """In the pool, whose ranks have met already."""
    joined = mock.patch.multiple(
        "torch.distributed", init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT
    )
    with joined:
        return own_module.main(STEPS)


def test_own_module_learns_the_same_split_and_whole(ranks, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    alone = own_module.main(STEPS)  # without torchrun
    assert "on 1 rank(s)" in capsys.readouterr().out
    assert alone[-1] < 2.7, "ln 16 = 2.77 is what is to be had without the memory"
    for losses in ranks.run(4, on_ranks):
        assert losses == pytest.approx(alone, rel=1e-3)
