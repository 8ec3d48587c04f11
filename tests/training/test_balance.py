"""Documents packed by attention's work: none lost, none mixed, and ranks that have about the same to do."""

from __future__ import annotations

import pytest
import torch

from ring_la import ArgumentError
from ring_la.layout import Layout
from ring_la.training import BalancedSequences, Corpus, PackedSequences, Work, batches
from ring_la.training.balance import by_rank, pack, plan, spread_over_ranks
from ring_la.training.flops import pairs

WORK = Work(token=300.0, pair=1.0)


def long_tailed(count: int, most: int, seed: int = 0) -> list[int]:
    """Log-normal lengths: most documents are short, most tokens are in long ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(count).log_normal_(5.0, 1.6, generator=generator)
    return lengths.long().clamp(2, most).tolist()


def corpus(lengths: list[int]) -> Corpus:
    """Documents whose tokens tell which document they are of, and which token of it."""
    self = Corpus.__new__(Corpus)
    self.offsets = torch.tensor([0, *lengths]).cumsum(0)
    self.documents, self.size, self.key, self.vocab_size = len(lengths), sum(lengths), "", 1 << 30
    self.tokens = torch.cat([torch.arange(n) + (d << 16) for d, n in enumerate(lengths)]).int()
    return self


@pytest.mark.parametrize("most", [None, 700])
def test_an_epoch_has_every_token_once_and_no_document_is_mixed(most):
    lengths = [*long_tailed(200, 4000), 9000]
    keywords = {"seed": 1, "replicas": 2, "ranks": 4}
    sequences = BalancedSequences(corpus(lengths), 4096, 4, WORK, max_document=most, **keywords)
    steps, seen = sequences._epoch(0), []
    for i in range(4 * len(steps)):
        ids, cu = sequences[i]
        assert len(ids) == cu[-1] <= 4096
        assert cu == sorted(set(cu))
        for a, b in zip(cu, cu[1:]):
            document, first = int(ids[a]) >> 16, int(ids[a]) & 0xFFFF
            assert torch.equal(ids[a:b], (document << 16) + torch.arange(first, first + b - a))
            assert b - a == lengths[document] or b - a <= (most or 4096) < lengths[document]
            seen += ids[a:b].tolist()
    seen += [(p.document << 16) + t for p in sequences._over[1] for t in range(p.start, p.stop)]  # of the next epoch
    assert len(seen) == len(set(seen)) == sum(lengths)


def test_what_comes_next_follows_from_the_number_of_sequences():
    data, keywords = corpus(long_tailed(150, 500)), {"seed": 2, "ranks": 2}
    all_of_them = BalancedSequences(data, 1024, 4, WORK, **keywords)
    later = BalancedSequences(data, 1024, 4, WORK, begin=8, **keywords)
    two = BalancedSequences(data, 1024, 4, WORK, begin=8, replicas=2, **keywords)
    far = 4 * 60  # some epochs on
    assert all(torch.equal(all_of_them[8 + i][0], later[i][0]) for i in (0, 3, far))
    shares = [list(batches(two, steps=1, size=2, replica=r, replicas=2)) for r in (0, 1)]
    alike = lambda group: sorted(tuple(ids.tolist()) for ids, _ in group)  # noqa: E731
    assert alike(shares[0] + shares[1]) == alike(later[i] for i in range(4))
    with pytest.raises(ArgumentError, match="sequences: expected a multiple of replicas = 3"):
        BalancedSequences(data, 1024, 4, WORK, replicas=3)
    for name in ("replicas", "ranks", "pool"):
        with pytest.raises(ArgumentError, match=f"{name}: expected an int ≥ 1, got 0"):
            BalancedSequences(data, 1024, 4, WORK, **{name: 0})
    with pytest.raises(ArgumentError, match="begin: expected an int ≥ 0, got -1"):
        BalancedSequences(data, 1024, 4, WORK, begin=-1)


def test_work_is_what_the_ranks_of_a_layout_have():
    lengths = [700, 13, 90, 411]
    found = by_rank(lengths, 4)
    positions = torch.cat([torch.arange(1, n + 1) for n in lengths])
    for r in range(4):
        mine = [s for s in Layout(sum(lengths), "zigzag", 4, r).segments if s.owner == r]
        assert int(found[r]) == sum(int(positions[s.start : s.stop].sum()) for s in mine)
    assert int(found.sum()) == sum(map(pairs, lengths))


def slowest_over_mean(groups: list[list[list[int]]], ranks: int) -> float:
    """Of micro-batches worked on at once, documents' lengths each: the time of the slowest rank over the mean's."""
    slowest = mean = 0.0
    for together in groups:
        work = torch.cat([WORK.token * sum(x) / ranks + WORK.pair * by_rank(x, ranks).double() for x in together])
        slowest, mean = slowest + float(work.max()), mean + float(work.mean())
    return slowest / mean


def test_ranks_of_a_long_tailed_mix_have_about_the_same_work():
    lengths = long_tailed(3000, 32768)
    data = corpus(lengths)
    packed, balanced = PackedSequences(data, 32768), BalancedSequences(data, 32768, 8, WORK, replicas=4, ranks=4)
    cut = [[packed[4 * s + r][1] for r in range(4)] for s in range(8)]
    whole = [[balanced[8 * s + 2 * r + j][1] for r in range(4)] for s in range(4) for j in range(2)]
    before, after = (
        slowest_over_mean([[[b - a for a, b in zip(cu, cu[1:])] for cu in together] for together in groups], 4)
        for groups in (cut, whole)
    )
    assert after < 1 + 0.4 * (before - 1), (before, after)
    even = BalancedSequences(data, 32768, 6, WORK, replicas=2, ranks=3, kind="balanced")  # in any order of documents
    slowest, mean = 0, 0.0
    for s in range(4):
        for cu in (even[6 * s + i][1] for i in range(6)):
            work = by_rank([b - a for a, b in zip(cu, cu[1:])], 3, "balanced")
            slowest, mean = slowest + int(work.max()), mean + float(work.double().mean())
    assert slowest < 1.02 * mean


def test_packing_leaves_over_what_has_no_room():
    steps = plan([60, 60, 60, 50], range(4), 2, 100, Work())
    assert [[[p.document for p in b.pieces] for b in step] for step in steps] == [[[0], [1]], [[2], [3]]]
    assert pack(steps[0][0].pieces, 1, 50, Work())[1] == steps[0][0].pieces
    one = steps[0][0].pieces
    assert spread_over_ranks(one, 4) == one
