"""States exchanged among the Triton kernels' own launches: interpreted, on files ranks share, against one device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import ring_la
from ring_la.kernels import choice as backends
from ring_la.scan import MailboxBorder
from tests.support.border_calls import errors
from tests.support.file_mailboxes import over_files
from tests.support.interpreter import interpreted
from tests.support.pool import group

interpreted()


def check_op(rank: int, size: int, folder: str, name: str, kinds: tuple[str, ...]) -> tuple[int, int]:
    """How many calls met at a border, and how many steps were replayed; all are compared."""
    from ring_la.kernels import families
    from ring_la.kernels.runtime import tape
    from ring_la.kernels.spans import table

    cp = ring_la.ContextParallel(group(size), scan="ring", validate="never")
    cp.comm = over_files(rank, size, folder)
    cp.comm.transport = cp.comm.mailboxes.torch
    begin = mock.patch.object(MailboxBorder, "begin", autospec=True, side_effect=MailboxBorder.begin)
    play = mock.patch.object(tape.Tape, "play", autospec=True, side_effect=tape.Tape.play)

    def unsupported(rule, x, recurrent: bool = False) -> str:  # but for tensors that are on no GPU
        return "in chunks only" if recurrent else families.unsupported(rule, x)

    triton = mock.patch.object(backends, "unsupported", unsupported)
    with begin as begun, play as played, triton, mock.patch.object(table, "LEAST_CHUNKS", 1):
        for kind in kinds:
            H = 2 if kind in ("contiguous", "zigzag") else 1  # programs take time
            worst = errors(cp, name, kind, H=H, Hk=H, K=16, V=16)
            assert max(worst.values()) < 1e-4, (kind, worst)
    assert cp.comm.mailboxes.late() == []
    return begun.call_count, played.call_count


OPS = {
    "linear_attention": (3, ("contiguous",)),
    "simple_gla": (2, ("rows", "edges")),
    "gla": (2, ("zigzag",)),
    "gated_delta_rule": (2, ("documents", "folded")),
}
"""Ranks and layouts; tests/gpu/test_symmetric.py has more."""


@pytest.mark.parametrize("name", OPS)
def test_against_one_device(ranks, tmp_path, name):
    size, kinds = OPS[name]
    for met, played in ranks.run(size, check_op, size, str(tmp_path), name, kinds, timeout=600):
        assert met == 10 * len(kinds)
        assert played >= 2


def check_kept(rank: int, size: int) -> list[bool]:
    """Whether a split call keeps anything for a backward pass: with gradients wanted, without, and under no_grad."""
    from ring_la.linear import exchange

    layout = ring_la.ContextParallel(group(size), scan="ring", validate="never").layout(8)
    wanted = [torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3)]
    make = mock.patch.object(exchange, "make_local", side_effect=exchange.make_local)
    with make as made:
        ring_la.linear_attention(*wanted, layout=layout)
        ring_la.linear_attention(*(x.detach() for x in wanted), layout=layout)
        with torch.no_grad():
            ring_la.linear_attention(*wanted, layout=layout)
    return [call.args[6].saved for call in made.call_args_list]


def test_nothing_is_kept_where_no_backward_follows(ranks):
    assert ranks.run(2, check_kept, 2) == [[True, False, False]] * 2
