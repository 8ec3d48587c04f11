"""Layouts: who owns which tokens, for any length, any kind and any packing."""

from __future__ import annotations

import itertools
import math
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_la import balanced
from ring_la.balanced import keys_received, pairs_before
from ring_la.errors import ArgumentError, UnsupportedError
from ring_la.layout import KINDS, Layout
from ring_la.scan import Chain
from ring_la.training.balance import by_rank


@st.composite
def packed(draw, most: int = 60):
    """(seq_len, cu_seqlens) with empty documents among them."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda x: 0 < sum(x) <= most))
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    return cu[-1], cu


def layouts(seq_len, kind, P, cu=None, multiple_of=1):
    return [Layout(seq_len, kind, P, r, cu, multiple_of) for r in range(P)]


@settings(max_examples=120, deadline=None)
@given(packed(), st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 8))
def test_every_token_has_one_owner(sequence, kind, P, multiple_of):
    seq_len, cu = sequence
    all_ranks = layouts(seq_len, kind, P, cu, multiple_of)
    tokens = torch.cat([x.tokens() for x in all_ranks])
    assert tokens.sort().values.tolist() == list(range(seq_len))
    for layout in all_ranks:
        assert layout.local_length == len(layout.tokens()) == layout.lengths[layout.rank]
        assert layout.tokens().is_contiguous()  # what searches among others warns
        owner, index = layout.owners_of(torch.arange(seq_len))
        mine = owner == layout.rank
        assert torch.equal(layout.tokens()[index[mine]], torch.arange(seq_len)[mine])


@settings(max_examples=120, deadline=None)
@given(packed(), st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 5))
def test_pieces_cut_documents_at_segments(sequence, kind, P):
    seq_len, cu = sequence
    document = torch.searchsorted(torch.tensor(cu[1:]), torch.arange(seq_len), right=True)
    seen = []
    for layout in layouts(seq_len, kind, P, cu):
        tokens = layout.tokens()
        assert torch.equal(layout.documents_of(tokens), document[tokens])
        assert torch.equal(layout.positions_of(tokens), tokens - torch.tensor(cu)[document[tokens]])
        for piece, start, stop in zip(layout.pieces, layout.piece_offsets, layout.piece_offsets[1:]):
            assert tokens[start:stop].tolist() == list(range(piece.start, piece.stop))
            assert (document[piece.start : piece.stop] == piece.document).all()
            assert piece.first == (piece.start == cu[piece.document])
            assert piece.last == (piece.stop == cu[piece.document + 1])
        seen += layout.pieces
    lengths = [sum(len(p) for p in seen if p.document == n) for n in range(len(cu) - 1)]
    assert lengths == [b - a for a, b in zip(cu, cu[1:])]


@settings(max_examples=100, deadline=None)
@given(packed(), st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 5))
def test_chain_follows_documents(sequence, kind, P):
    """A link needs its predecessor's state unless a document starts there; its reverse is the adjoint's order."""
    seq_len, cu = sequence
    layout = Layout(seq_len, kind, P, 0, cu)
    chain = Chain.of(layout)
    starts = {a for a, b in zip(cu, cu[1:]) if b > a}
    for i, s in enumerate(layout.segments):
        assert chain.needs[i] == (s.start not in starts)
        assert chain.passes[i] == (not starts & set(range(s.start, s.stop)))
        assert chain.feeds(i) == (i + 1 < len(chain) and chain.needs[i + 1])
    back, n = chain.reversed, len(chain)
    assert [back.needs[n - 1 - i] for i in range(n)] == [chain.feeds(i) for i in range(n)]


def test_lengths_differ_by_one_unit():
    assert [x.local_length for x in layouts(1003, "contiguous", 4)] == [250, 251, 251, 251]
    assert sum(x.local_length for x in layouts(1003, "zigzag", 4)) == 1003
    assert [x.local_length for x in layouts(3, "contiguous", 4)].count(0) == 1
    borders = [s.start for s in Layout(1000, "zigzag", 4, 0, multiple_of=64).segments]
    assert all(b % 64 == 0 for b in borders)


def test_zigzag_order():
    assert [s.owner for s in Layout(80, "zigzag", 4, 0).segments] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (dict(seq_len=0), "seq_len"),
        (dict(seq_len=8.0), "seq_len"),
        (dict(seq_len=8, kind="spiral"), "kind"),
        (dict(seq_len=8, cu_seqlens=[1, 8]), "cu_seqlens"),
        (dict(seq_len=8, cu_seqlens=[0, 5, 4, 8]), "cu_seqlens"),
        (dict(seq_len=8, cu_seqlens=[0, 5, 9]), "cu_seqlens"),
        (dict(seq_len=8, cu_seqlens=[0]), "cu_seqlens"),
        (dict(seq_len=8, cu_seqlens=torch.tensor([0.0, 8.0])), "cu_seqlens"),
        (dict(seq_len=8, rank=3, world_size=2), "rank"),
        (dict(seq_len=8, multiple_of=0), "multiple_of"),
        (dict(seq_len=8, multiple_of=True), "multiple_of"),
        (dict(seq_len=8, kind="balanced", window=-1), "window"),
        (dict(seq_len=8, kind="balanced", window=2.0), "window"),
        (dict(seq_len=8, kind="zigzag", window=2), "window"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ArgumentError, match=rf"^{name}: expected .*, got") as caught:
        Layout(**arguments)
    assert caught.value.name == name
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # from a worker process


def test_striped_has_no_runs():
    with pytest.raises(UnsupportedError, match="convert"):
        Layout(8, "striped", 2).require_runs("a recurrence")


def documents_of(long_tail: bool, seed: int) -> list[int]:
    """30 lengths: log-uniform from 64 to 16,384, or of a long tail (Pareto, index 0.9)."""
    draw = random.Random(seed)
    if long_tail:
        return [int(64 * (1 - draw.random()) ** (-1 / 0.9)) for _ in range(30)]
    return [int(math.exp(draw.uniform(math.log(64), math.log(16384)))) for _ in range(30)]


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("long_tail", [False, True])
def test_balanced_documents_make_even_work(P, long_tail):
    """The dearest rank's pairs over the mean: a zigzag of the sequence leaves it up to 3 times the others' work."""
    dearest = {}
    for kind in ("zigzag", "balanced"):
        by_seed = (by_rank(documents_of(long_tail, seed), P, kind).double() for seed in range(4))
        dearest[kind] = max(float(x.max() / x.mean()) for x in by_seed)
    assert dearest["balanced"] < 1.1 < dearest["zigzag"]
    cu = [0, *itertools.accumulate(documents_of(long_tail, 0))]
    lengths = Layout(cu[-1], "balanced", P, 0, cu).lengths
    assert max(lengths) - min(lengths) <= 8


def test_balanced_documents_send_few_keys(monkeypatch):
    """Of these two draws ranks receive half as many keys again where segments are dealt by work alone."""

    def received() -> float:
        total = 0.0
        for seed in range(2):
            cu = [0, *itertools.accumulate(documents_of(True, seed))]
            split = Layout(cu[-1], "balanced", 2, 0, cu).segments
            total += sum(keys_received([0, *(s.stop for s in split)], [s.owner for s in split], cu, 2)) / cu[-1]
        return total

    few = received()
    monkeypatch.setattr(balanced, "_by_work_and_keys", lambda work, pieces, *how: balanced._by_work(work, *how))
    assert 1.5 * few < received()


def visible(cu: tuple[int, ...], window: int | None) -> torch.Tensor:
    """Which keys each query of packed documents sees."""
    at = torch.arange(cu[-1])
    document = torch.searchsorted(torch.tensor(cu[1:]), at, right=True)
    apart = at[:, None] - at
    near = torch.ones_like(apart, dtype=torch.bool) if window is None else apart <= window
    return (document[:, None] == document) & (apart >= 0) & near


@pytest.mark.parametrize("window", [None, 0, 1, 7, 40])
@pytest.mark.parametrize("cu", [(0, 50), (0, 3, 3, 20, 50)])
def test_what_balanced_layouts_count(cu, window):
    """Pairs and keys of others, beside a dense mask."""
    mask, P = visible(cu, window), 3
    assert pairs_before(range(51), cu, window) == [0, *mask.sum(1).cumsum(0).tolist()]
    layout = Layout(50, "balanced", P, cu_seqlens=cu, window=window)
    borders, owners = [0, *(s.stop for s in layout.segments)], [s.owner for s in layout.segments]
    whose = layout.owners_of(torch.arange(50))[0]
    seen = [int(mask[whose == r][:, whose != r].any(0).sum()) for r in range(P)]
    assert keys_received(borders, owners, cu, P, window) == seen


@pytest.mark.parametrize(("tokens", "P"), [(32768, 2), (65536, 4), (16384, 8), (9001, 3)])
@pytest.mark.parametrize("unit", [1, 64])
def test_windows_make_even_work(tokens, P, unit):
    """A zigzag gives all of the first tokens' short windows to some ranks: the dearest has 1.03 to 1.14 of the mean."""
    layout = Layout(tokens, "balanced", P, multiple_of=unit, window=4095)
    assert max(layout.lengths) - min(layout.lengths) <= unit
    assert all(s.stop % unit == 0 for s in layout.segments[:-1])
    before, work = pairs_before([0, *(s.stop for s in layout.segments)], (0, tokens), 4095), [0] * P
    for s, a, b in zip(layout.segments, before, before[1:]):
        work[s.owner] += b - a
    assert max(work) * P <= (1.001 if unit == 1 else 1.03) * sum(work)
    assert len(layout.segments) == 2 * P - 1
