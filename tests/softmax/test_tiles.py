"""Tiles, strips, squares and packs hold each visible pair once and no other, for any split, documents and mask."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_la.layout import Layout
from ring_la.softmax.backends.packs import packs
from ring_la.softmax.backends.triton.plan import of_keys, of_queries
from ring_la.softmax.backends.varlen import Window
from ring_la.softmax.geometry import Pair, Reach, Tile, Tokens, sees, strips, tiles
from ring_la.softmax.geometry.tiles import square
from ring_la.softmax.strategies import HeadSplit

CPU = torch.device("cpu")


@st.composite
def sides(draw):
    """Queries and keys of two ranks, or of several whose tokens were put in order."""
    T, P = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=5)))
    layout = Layout(T, draw(st.sampled_from(["contiguous", "zigzag", "striped"])), P, cu_seqlens=[0, *cuts, T])
    some = st.lists(st.integers(0, P - 1), min_size=1, max_size=P, unique=True)
    rows, keys = (Tokens.of_ranks(layout, draw(some), CPU) for _ in range(2))
    if draw(st.booleans()):
        rows = keys
    if draw(st.booleans()):
        keys = keys.fewest_runs()[0]
    if draw(st.booleans()):
        keys = Tokens.joined([keys, Tokens.joint(draw(st.integers(0, 5)), CPU, -3, T)])
    bound = st.one_of(st.none(), st.integers(0, 30))
    return Pair(rows, keys, Reach(draw(bound), draw(st.one_of(st.just(0), bound))))


def wanted(pair: Pair) -> torch.Tensor:
    distance = pair.keys.positions[None, :] - pair.rows.positions[:, None]
    return pair.reach.visible(distance, pair.rows.documents, pair.keys.documents)


def shown(tile: Tile, want: torch.Tensor) -> torch.Tensor:
    """The pairs a tile's own mask lets through; where it follows no band it asks positions."""
    n, m = tile.q1 - tile.q0, tile.k1 - tile.k0
    if not tile.band:
        return want[tile.rows, tile.keys]
    ahead = torch.arange(m)[None] - torch.arange(n)[:, None]
    seen = torch.ones(n, m, dtype=torch.bool)
    if tile.lo is not None:
        seen &= ahead >= tile.lo
    if tile.hi is not None:
        seen &= ahead <= tile.hi
    return seen


def covered(parts: list[Tile], want: torch.Tensor) -> torch.Tensor:
    count = torch.zeros(want.shape, dtype=torch.int64)
    for tile in parts:
        count[tile.rows, tile.keys] += shown(tile, want)
    return count


@settings(max_examples=300, deadline=None)
@given(sides())
def test_each_visible_pair_once(pair):
    want, parts = wanted(pair), tiles(pair)
    assert torch.equal(covered(parts, want), want.long())
    assert sees(pair) == bool(parts)
    assert torch.equal(covered([s for t in parts for s in strips(t, 7)], want), want.long())
    assert all(shown(t, want).any(0).all() and shown(t, want).any(1).all() for t in parts if t.band)
    if pair.reach.left is None and all(t.band for t in parts):
        small = [s for t in parts for s in square(t)]
        assert torch.equal(covered(small, want), want.long())
        assert all(t.full or (t.hi == 0 and t.q1 - t.q0 == t.k1 - t.k0) for t in small)


def shown_by(window: Window, n: int, m: int) -> torch.Tensor:
    """The pairs FlashAttention lets through of n rows and m keys."""
    ahead = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
    right = 0 if window.causal else window.right
    return ((ahead <= right) | (right < 0)) & ((ahead >= -window.left) | (window.left < 0))


@settings(max_examples=200, deadline=None)
@given(sides())
def test_flash_windows_and_packs(pair):
    """FlashAttention's way to name a mask, and varlen calls, show the same pairs."""
    want, parts = wanted(pair), tiles(pair)
    for tile in (t for t in parts if t.band):
        seen = shown_by(Window.of(tile), tile.q1 - tile.q0, tile.k1 - tile.k0)
        assert torch.equal(seen, shown(tile, want))
    together, single = packs(pair)
    count = covered(single, want)
    for p in together:
        q, k = (torch.arange(len(t))[s.rows] for t, s in ((pair.rows, p.q), (pair.keys, p.k)))
        assert p.q.longest == int(p.q.cu.diff().max())
        for a, b, c, d in zip(p.q.cu, p.q.cu[1:], p.k.cu, p.k.cu[1:]):
            count[q[a:b][:, None], k[c:d][None]] += shown_by(p.window, int(b - a), int(d - c))
        assert q.unique().numel() == q.numel()
    assert torch.equal(count, want.long())


def test_few_large_calls():
    """Zigzag: one call with the keys of any rank, whichever it is."""
    layout, causal = Layout(64, "zigzag", 4), Reach(right=0)
    side = [Tokens.of_ranks(layout, [r], CPU) for r in range(4)]
    assert tiles(Pair(side[1], side[1], causal)) == [Tile(0, 16, 0, 16, hi=0)]
    assert tiles(Pair(side[2], side[0], causal)) == [Tile(0, 16, 0, 8)]
    assert tiles(Pair(side[0], side[2], causal)) == [Tile(8, 16, 0, 16)]
    striped = [Tokens.of_ranks(Layout(64, "striped", 4), [r], CPU) for r in range(4)]
    assert tiles(Pair(striped[0], striped[2], causal)) == [Tile(1, 16, 0, 15, hi=0)]


def test_what_follows_from_two_sides_is_kept_with_them():
    """Made once for both sides and a reach, and gone with either."""
    rows, keys = (Tokens.whole(9, CPU) for _ in range(2))
    first = tiles(Pair(rows, keys, Reach(right=0)))
    assert tiles(Pair(rows, keys, Reach(right=0))) is first
    assert tiles(Pair(rows, keys, Reach())) is not first
    assert len(rows.met) == 1
    del keys
    assert len(rows.met) == 0


@settings(max_examples=200, deadline=None)
@given(sides(), st.sampled_from([(4, 2), (8, 8), (16, 4)]))
def test_lists_of_the_triton_kernels(pair, blocks):
    """No visible pair lies in a tile left out, no hidden one in a tile said to be whole."""
    if not len(pair.rows) or not len(pair.keys):
        return
    (bm, bn), want = blocks, wanted(pair)
    for lists, mask, a, b in ((of_queries, want, bm, bn), (of_keys, want.T, bn, bm)):
        side = lists(pair, bm, bn)
        for i, (order, (whole, count)) in enumerate(zip(side.tiles.tolist(), side.counts.tolist())):
            band = mask[i * a : (i + 1) * a]
            for n, j in enumerate(order):
                pairs = band[:, j * b : (j + 1) * b]
                assert n < count or not pairs.any()
                assert n >= whole or pairs.all()


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_each_head_once(groups, ratio, ranks):
    split = HeadSplit(groups * ratio, groups, ranks)
    assert [h for a, b in split.queries for h in range(a, b)] == list(range(groups * ratio))
    for rank in range(ranks):
        (a, b), (first, last) = split.queries[rank], split.keys[rank]
        reads = split.reads(rank)
        assert [first + r for r in reads] == [h // ratio for h in range(a, b)]
        assert sorted(set(reads)) == list(range(last - first))
        if reads and split.even(rank):
            assert reads == [i // (len(reads) // (last - first)) for i in range(len(reads))]
