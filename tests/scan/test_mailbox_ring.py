"""The ring in one kernel a link, interpreted, on files the ranks share in place of symmetric memory."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from ring_la.algebra import Affine, transpose
from ring_la.comm import copy_kernel
from ring_la.layout import Layout
from ring_la.scan import CANONICAL, STRATEGIES, Chain, Link
from ring_la.scan.link_kernel import SMALL
from ring_la.scan.mailbox_ring import DenseMaps, Hop, LinkStates, launch_dense
from tests.support.chain_maps import maps, serial
from tests.support.file_mailboxes import over_files
from tests.support.interpreter import interpreted
from tests.support.line_of_ranks import CHUNK, groups
from tests.support.pool import group

interpreted()

CHAINS = {
    "contiguous": ("contiguous", None),
    "zigzag": ("zigzag", None),
    "documents": ("zigzag", [0, 5, 16, 40, 48]),  # starts inside segments and on their borders
}


def check_ring(rank: int, size: int, folder: str, rows: int = 1) -> int:
    """A rank of so many: `rows` of three states each, on three lanes."""
    g, checked = over_files(rank, size, folder, chunk=1024), 0
    for kind_of_layout, documents in CHAINS.values():
        whole = Chain.of(Layout(48, kind_of_layout, size, rank, documents))
        for kind in ("identity", "scalar", "diagonal", "dense"):
            forward = maps(whole, kind, (rows, 3, 40, 6))
            back = [Affine(kind, transpose(kind, m.A), m.b) for m in forward[::-1]]
            for chain, links in ((whole, forward), (whole.reversed, back)):
                before = g.bytes_sent
                mine = [Link(links[i]) for i in chain.local(rank)]
                like = Affine(kind, None, links[0].b)
                got = STRATEGIES["ring"].start(chain, mine, like, g).wait()
                for i, state in zip(chain.local(rank), got):
                    want = serial(chain, links)[i]
                    assert (state is None) == (want is None), (kind, i)
                    assert want is None or torch.allclose(state, want, rtol=1e-5, atol=1e-6), (kind, i)
                    checked += want is not None
                crossing = [i for i in chain.local(rank) if chain.feeds(i) and chain.owners[i + 1] != rank]
                assert g.bytes_sent - before == len(crossing) * like.b.nbytes
    assert g.transport.late() == []
    return checked


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 2], ids=["a unit a lane", "two units a lane"])
def test_against_serial(ranks, tmp_path, size, rows):
    assert sum(ranks.run(size, check_ring, size, str(tmp_path), rows)) > 20


def check_canonical(rank: int, folder: str) -> None:
    """Links that push a state themselves, which the first rank's does not, go by messages on every rank."""
    g, like = over_files(rank, 2, folder), Affine("scalar", None, torch.ones(1, 1, 4, 4))
    link = Link(Affine("scalar", torch.ones(1, 1), like.b * (1 + rank)), (lambda state: 2 * state) if rank else None)
    (entering,) = CANONICAL.start(Chain.line(2), [link], like, g).wait()
    assert entering is None if rank == 0 else torch.equal(entering, like.b)


def test_a_canonical_fold_goes_by_messages(ranks, tmp_path):
    ranks.run(2, check_canonical, str(tmp_path))


def check_horizon(rank: int, folder: str, forgets: bool) -> float:
    """The first rank comes late; how long before that the last has what enters its link (negative: after)."""
    g = over_files(rank, 3, folder)
    chain = Chain((0, 1, 2), (False, True, True), (False, True, True))
    b = torch.full((1, 1, 4, 4), 1.0 + rank)
    link = Link(Affine("scalar", torch.full((1, 1), 0.0 if forgets else 0.5), b))
    clock = torch.zeros(1, dtype=torch.float64)
    dist.barrier(group(3))
    if rank == 0:
        time.sleep(1.5)
        clock += time.monotonic()
    (entering,) = STRATEGIES["ring"].start(chain, [link], Affine("scalar", None, b), g).wait()
    done = time.monotonic()
    dist.broadcast(clock, 0, group=group(3))
    if rank == 2:
        assert torch.equal(entering, torch.full_like(b, 2.0 if forgets else 2.5))
    return clock.item() - done


def test_a_link_that_forgets_waits_for_nobody(ranks, tmp_path):
    assert ranks.run(3, check_horizon, str(tmp_path), True)[2] > 0.5
    assert ranks.run(3, check_horizon, str(tmp_path), False)[2] < 0


def check_flagged(rank: int, folder: str, flagged: bool) -> tuple[float, torch.Tensor]:
    """A dense link whose flag may say that its transition is 0. How long before the first rank, which comes late, the
    last has what enters it; and that."""
    g = over_files(rank, 3, folder)
    zero = torch.full((1, 1), int(flagged), dtype=torch.int32)
    A = torch.full((1, 1, 16, 16), torch.nan if flagged else 0.5)
    b, entering = torch.full((1, 1, 16, 16), 1.0 + rank), torch.zeros(1, 1, 16, 16)
    hop = Hop(rank - 1 if rank else None, rank + 1 if rank < 2 else None, rank == 1)
    clock = torch.zeros(1, dtype=torch.float64)
    dist.barrier(group(3))
    if rank == 0:
        time.sleep(1.5)
        clock += time.monotonic()
    states = LinkStates(None, entering[:, None] if rank else None, None)
    launch_dense(g, DenseMaps(A[:, None], b[:, None], zero[:, None], squares(A[:, None])), states, hop)
    done = time.monotonic()
    dist.broadcast(clock, 0, group=group(3))
    return clock.item() - done, entering


@pytest.mark.parametrize(("flagged", "enters"), [(True, 2), (False, 10)])
def test_a_flagged_transition_is_not_read_and_waits_for_nobody(ranks, tmp_path, flagged, enters):
    (_, _), (_, second), (ahead, third) = ranks.run(3, check_flagged, str(tmp_path), flagged)
    assert (ahead > 0.5) == flagged
    assert (second == 1).all()
    assert (third == enters).all()


def squares(A: torch.Tensor) -> torch.Tensor:
    """Of transitions [B, NS, H, K, K], in eight parts."""
    return A.square().reshape(*A.shape[:3], 8, -1).sum(-1)


SPANS, K = 5, 16
FLAGGED = [z for n in range(SPANS + 1) for z in itertools.combinations(range(SPANS), n)]
"""Which transitions of a piece's spans are 0."""


def through_spans(A: torch.Tensor, b: torch.Tensor, zero: torch.Tensor, x: torch.Tensor, reverse: bool):
    """What enters each span, and what leaves the last, span by span."""
    entering = torch.zeros_like(b)
    for s in range(len(b))[::-1] if reverse else range(len(b)):
        entering[s] = x
        a = A[s].mT if reverse else A[s]
        x = b[s] if zero[s] else a @ x + b[s]
    return entering, x


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gets", [False, True])
def test_every_choice_of_spans_that_forget(reverse, gets):
    """What is flagged is not read; forward what enters a span behind one is not asked for."""
    torch.manual_seed(0)
    A, b, x = torch.randn(SPANS, K, K) / K**0.5, torch.randn(SPANS, K, K), torch.randn(K, K)
    (alone,) = groups(1, x.device)
    for flagged, final in itertools.product(FLAGGED, (False, True)):
        zero = torch.zeros(SPANS, dtype=torch.int32)
        zero[list(flagged)] = 1
        spans = [t[None, :, None] for t in (A.masked_fill(zero[:, None, None].bool(), torch.nan), b, zero)]
        entering, leaving = torch.full((1, SPANS, 1, K, K), torch.nan), torch.full((1, 1, 1, K, K), torch.nan)
        states = LinkStates(x[None, None, None] if gets else None, entering, leaving if final else None)
        maps = DenseMaps(*spans, squares(spans[0]))
        launch_dense(alone, maps, states, Hop(None, None, True, earlier=0), reverse=reverse)
        want, left = through_spans(A, b, zero, x if gets else torch.zeros_like(x), reverse)
        asked = [s for s in range(SPANS) if reverse or s == 0 or not zero[s - 1]]
        assert torch.allclose(entering[0, asked, 0], want[asked], atol=1e-4), (flagged, final)
        assert not final or torch.allclose(leaving[0, 0, 0], left, atol=1e-4), (flagged, final)


class InTheMiddle:
    """Three ranks of one process, the second of which has spans [2, SPANS, 1, K, K]; x [2, 1, 1, K, K] enters them.
    What is left of it is known of whole pieces, or bounded by squares of spans' transitions (`measured`)."""

    def __init__(self, reverse: bool, measured: bool) -> None:
        torch.manual_seed(0)
        self.reverse, self.measured, self.ranks = reverse, measured, groups(3, torch.device("cpu"))
        self.A, self.b = torch.randn(2, SPANS, 1, K, K) / K**0.5, torch.randn(2, SPANS, 1, K, K)

    def send(self, x: torch.Tensor) -> None:
        launch_dense(self.ranks[0], DenseMaps(None, x), LinkStates(None, None, None), Hop(None, 1, False))

    def link(self, x: torch.Tensor, zero: torch.Tensor, final: bool = False) -> tuple[torch.Tensor, ...]:
        """What enters each span and what leaves (NaN where nothing was stored), as it is and as it should be."""
        want, left = (torch.empty_like(t) for t in (self.b, x))
        through, added = torch.zeros_like(x), torch.empty_like(x)
        for i, h in itertools.product(range(2), range(x.shape[2])):
            maps = self.A[i, :, h], self.b[i, :, h], zero
            want[i, :, h], left[i, 0, h] = through_spans(*maps, x[i, 0, h], self.reverse)
            added[i, 0, h] = through_spans(*maps, torch.zeros(K, K), self.reverse)[1]
            if not zero.any():
                through[i, 0, h] = torch.linalg.multi_dot([*maps[0]][::-1])
        flags = zero[None, :, None].expand(2, -1, x.shape[2]).contiguous()
        A = self.A.masked_fill(flags[..., None, None].bool(), torch.nan if self.measured else 0)
        entering = torch.full_like(self.b, torch.nan)
        states = LinkStates(None, entering, added if final else None)
        dense = DenseMaps(A, self.b, through=(through, added))
        if self.measured:
            dense = DenseMaps(A, self.b, flags, squares(A))
        launch_dense(self.ranks[1], dense, states, Hop(0, 2, True), reverse=self.reverse)
        return entering, want, added if final else left, left

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        arrived = torch.full_like(x, torch.nan)
        launch_dense(self.ranks[2], DenseMaps(None, x), LinkStates(None, arrived, None), Hop(1, None, False))
        return arrived


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_choice_in_the_middle(reverse, measured):
    """One call after the other, the final states over what the piece adds; all is given back."""
    line = InTheMiddle(reverse, measured)
    empty = torch.empty_like(line.ranks[0].mailboxes.own)
    copy_kernel.prepare(empty, 3, CHUNK)
    for flagged, final in itertools.product(FLAGGED, (False, True)):
        zero, x = torch.zeros(SPANS, dtype=torch.int32), torch.randn(2, 1, 1, K, K)
        zero[list(flagged)] = 1
        line.send(x)
        entering, want, kept, left = line.link(x, zero, final)
        asked = [s for s in range(SPANS) if reverse or s == 0 or not zero[s - 1]]
        assert torch.allclose(entering[:, asked], want[:, asked], atol=1e-4), (flagged, final)
        assert torch.allclose(kept, left, atol=1e-4), (flagged, final)
        assert torch.allclose(line.receive(x), left, atol=1e-4), (flagged, final)
        for r in line.ranks:
            assert torch.equal(r.mailboxes.own, empty), (flagged, final, r.rank)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_piece_that_forgets_in_all_waits_for_nobody_in_the_middle(reverse, measured):
    """None of its spans does alone. What it adds goes on though what should enter it never comes."""
    line = InTheMiddle(reverse, measured)
    x, zero = torch.randn(2, 1, 1, K, K), torch.zeros(SPANS, dtype=torch.int32)
    line.A *= 1e-3
    line.ranks[1].mailboxes.patience = 0
    entering, _, _, left = line.link(x, zero)
    assert entering[:, -1 if reverse else 0].isnan().all()
    assert torch.allclose(line.receive(x), left, atol=1e-4)
    assert line.ranks[1].mailboxes.late() == [0]


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_what_enters_the_spans_of_such_a_piece(reverse, measured, final):
    """It comes behind what leaves. One span lets nothing through; before it what comes is as large as what is added."""
    line = InTheMiddle(reverse, measured)
    x, zero = torch.randn(2, 1, 1, K, K), torch.zeros(SPANS, dtype=torch.int32)
    line.A[:, 2] *= 1e-15
    assert squares(line.A).sum(-1).sqrt().log2().sum(1).max() < SMALL
    line.send(x)
    entering, want, kept, left = line.link(x, zero, final)
    assert torch.allclose(entering, want, atol=1e-4)
    assert torch.allclose(kept, left, atol=1e-4)
    assert torch.allclose(line.receive(x), left, atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [1, 40])
def test_few_and_many_spans_of_documents(count, reverse):
    """More than there are flags to read at a time. What enters is this rank's own or another's; one of two heads may
    forget it."""
    lo, one = 3, torch.zeros(1, 1, 2, K, K)
    for small, own, forgets in itertools.product((False, True), repeat=3):
        torch.manual_seed(count)
        A, b = torch.randn(1, lo + count, 2, K, K) / K**0.5, torch.randn(1, lo + count, 2, K, K)
        A[:, lo] *= 1e-30 if small else 1
        zero, first = torch.zeros(1, lo + count, 2, dtype=torch.int32), torch.tensor([[0, lo], [lo, count]]).int()
        zero[:, lo + count - 1 if reverse else lo, 1] = forgets
        A.masked_fill_(zero[..., None, None].bool(), torch.nan)
        x, entering, leaving = torch.randn_like(one), torch.full_like(b, torch.nan), torch.full_like(one, torch.nan)
        before, middle, behind = groups(3, x.device)
        launch_dense(before, DenseMaps(None, x), LinkStates(None, None, None), Hop(None, 1, False))
        states = LinkStates(x.expand(-1, 2, -1, -1, -1).contiguous() if own else None, entering, None)
        hop = Hop(None, 2, True, 1, earlier=0) if own else Hop(0, 2, True, 1)
        launch_dense(middle, DenseMaps(A, b, zero, squares(A), first), states, hop, reverse=reverse)
        launch_dense(behind, DenseMaps(None, x), LinkStates(None, leaving, None), Hop(1, None, False))
        for h in range(2):
            want, left = through_spans(A[0, lo:, h], b[0, lo:, h], zero[0, lo:, h], x[0, 0, h], reverse)
            asked = [s for s in range(count) if reverse or s == 0 or not zero[0, lo + s - 1, h]]
            limit = 1e-4 * max(1, want.abs().max().item())
            assert torch.allclose(entering[0, lo:, h][asked], want[asked], atol=limit), (small, own, forgets)
            assert torch.allclose(leaving[0, 0, h], left, atol=limit), (small, own, forgets)
        assert not middle.mailboxes.late()
