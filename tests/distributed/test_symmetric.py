"""Messages by mailboxes: the kernel itself, interpreted, on files the ranks share in place of symmetric memory.

The GPUs' own check is tests/gpu/test_symmetric.py.
"""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.comm.calls import Entry
from ring_la.errors import DisagreementError
from tests.support.file_mailboxes import over_files
from tests.support.interpreter import interpreted
from tests.support.pool import group

interpreted()


def check_messages(rank: int, size: int, folder: str) -> int:
    """Every pattern, twice (the mailboxes are used again), in sizes of part of a chunk to several rounds of blocks."""
    g = over_files(rank, size, folder)
    launches = []
    launch = g.transport._launch
    g.transport._launch = lambda *a: (launches.append(a[0].size), launch(*a))
    everyone = range(size)

    def value(source: int, to: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(n) % 97 + 100 * source + 10 * to).to(dtype)

    for n, dtype in ((4, torch.float32), (8, torch.bfloat16), (184, torch.float32)):
        for _ in range(2):
            rows = g.all_gather(value(rank, 0, n, dtype)).wait()
            assert torch.equal(rows, torch.stack([value(r, 0, n, dtype) for r in everyone]))
            sent = torch.stack([value(rank, r, n, dtype) for r in everyone])
            rows = g.all_to_all(sent).wait()
            assert torch.equal(rows, torch.stack([value(r, rank, n, dtype) for r in everyone]))
            right, left = (rank + 1) % size, (rank - 1) % size
            receives = {left: torch.empty(n, dtype=dtype)}
            g.exchange({right: value(rank, right, n, dtype)}, receives).wait()
            assert torch.equal(receives[left], value(left, rank, n, dtype))
            if rank:  # a chain
                got = g.recv((n,), dtype, g.device, rank - 1).wait()
                assert torch.equal(got, value(rank - 1, rank, n, dtype))
            if rank < size - 1:
                g.send(value(rank, rank + 1, n, dtype), rank + 1).wait()
        total = g.all_reduce(value(rank, 0, n, torch.float32)).wait()
        assert torch.equal(total, sum(value(r, 0, n, torch.float32) for r in everyone))
    # sizes that differ by pair, tensors that lie apart, one that is no multiple of 16 bytes
    sizes = {(a, b): 4 * (1 + (a + 2 * b) % 3) - (a == 0 and b == 1) for a in everyone for b in everyone if a != b}
    sends = {b: value(a, b, n, torch.float32) for (a, b), n in sizes.items() if a == rank}
    receives = {a: torch.empty(n) for (a, b), n in sizes.items() if b == rank}
    g.exchange(sends, receives).wait()
    assert all(torch.equal(t, value(a, rank, sizes[a, rank], torch.float32)) for a, t in receives.items())
    assert g.transport.late() == []
    return len(launches)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_by_mailboxes(ranks, tmp_path, size):
    assert min(ranks.run(size, check_messages, size, str(tmp_path))) > 20


def check_words(rank: int, size: int, folder: str) -> tuple[list[bool], str]:
    """Ranks that replay graphs of different calls, which no log sees: what arrives of which rank, and the error."""
    g = over_files(rank, size, folder)
    g.agreement.again(Entry.of("a call", "that both are in"))
    assert g.all_gather(torch.ones(8)).wait().eq(1).all()
    g.transport.word = lambda: 5 + 2 * rank
    rows = g.all_gather(torch.ones(8)).wait()
    with pytest.raises(DisagreementError) as caught:
        g.all_gather(torch.ones(8))
    return rows.isnan().all(1).tolist(), str(caught.value)


def test_a_message_of_another_call_is_told_by_its_word(ranks, tmp_path):
    for rank, (missing, error) in enumerate(ranks.run(2, check_words, 2, str(tmp_path))):
        assert missing == [rank == 1, rank == 0]
        assert f"rank {rank} got a message of another one from rank {1 - rank}" in error


def check_halo(rank: int, size: int, folder: str) -> int:
    """A split convolution beside the whole one, its halo through mailboxes that stand beside another transport."""
    cp = ring_la.ContextParallel(group(size), scan="ring", validate="never")
    cp.comm = g = over_files(rank, size, folder)
    g.transport, launches, launch = g.mailboxes.torch, [], g.mailboxes._launch
    g.mailboxes._launch = lambda *a: (launches.append(a[0].size), launch(*a))
    draw = torch.Generator().manual_seed(5)
    x, w, do = (torch.randn(s, generator=draw) for s in ((1, 12 * size, 8), (8, 4), (1, 12 * size, 8)))
    layout = cp.layout(12 * size, "zigzag")
    mine, weight = layout.shard(x).requires_grad_(), w.clone().requires_grad_()
    o = ring_la.short_conv(mine, weight, layout=layout).o
    dx, dw = torch.autograd.grad(o, (mine, weight), layout.shard(do))
    x.requires_grad_(), w.requires_grad_()
    whole = ring_la.short_conv(x, w).o
    wanted = torch.autograd.grad(whole, (x, w), do)
    torch.testing.assert_close(o, layout.shard(whole))
    torch.testing.assert_close(dx, layout.shard(wanted[0]))
    torch.testing.assert_close(g.all_reduce(dw).wait(), wanted[1])
    return len(launches)


def test_halos_by_mailboxes(ranks, tmp_path):
    assert min(ranks.run(2, check_halo, 2, str(tmp_path))) == 2
