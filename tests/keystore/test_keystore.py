"""Keys that stay on their ranks: one token's attention to all of them is that of one process to the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_la import ArgumentError, ContextParallel, attention
from ring_la.indexers import block_index
from ring_la.inference import (
    KeyRows,
    KeySize,
    KeyStore,
    decode_attention,
    decode_blocks,
    decode_index,
    decode_latents,
    read_attention,
)
from ring_la.keystore import with_earlier
from tests.support.pool import group

LENGTHS = (37, 5, 1, 90)
H, HK, K, V, BLOCK = 4, 2, 6, 5, 2  # 32 tokens side by side are read where they are


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(q: Tensor, k: Tensor, v: Tensor, window: int = -1, softcap: float = 0.0, sinks: Tensor | None = None):
    """The last token ``q [H, K]`` over ``k, v [S, HK, ·]``: o ``[H, V]``, lse ``[H]``."""
    begin = 0 if window < 0 else max(0, len(k) - 1 - window)
    k, v = (x[begin:].repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("hk,shk->hs", q, k) * q.shape[1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if sinks is None else torch.cat([scores, sinks[:, None]], 1)
    o = torch.einsum("hs,shv->hv", scores.softmax(1)[:, : len(k)], v)
    return o, scores.logsumexp(1)


def halves(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[…, HK, K]`` as latents and rotary keys."""
    return k[..., :1, :4], k[..., 1:, :2]


def check_decoding(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    store = KeyStore([KeySize(HK, K, V), KeySize(1, 4, 2)], cp, dtype=torch.float64, block=BLOCK)
    keys, values, parts = [], [], []
    for i, n in enumerate(LENGTHS):
        keys.append(drawn(i, n, HK, K))
        values.append(drawn(9 + i, n, HK, V))
        layout = cp.layout(n, ("zigzag", "contiguous", "striped")[i % 3])
        parts.append(store.open(1).extended(layout))
        parts[-1][0].put(*(layout.shard(x[-1][None]) for x in (keys, values)))
        parts[-1][1].put(*halves(layout.shard(keys[-1][None])))
    rows, options = KeyRows.joined(parts), [{}, dict(window=6), dict(softcap=2.0, sinks=drawn(3, H))]
    del parts
    for t in range(7):
        q, k, v = drawn(20 + t, len(rows), 1, H, K), drawn(30 + t, len(rows), 1, HK, K), drawn(40 + t, 4, 1, HK, V)
        keys, values = ([torch.cat([a, b]) for a, b in zip(*pair)] for pair in ((keys, k), (values, v)))
        rows = rows.advanced(in_place=t % 2 == 1)
        rows[0].put(k, v)
        rows[1].put(*halves(k))
        sent = cp.comm.bytes_sent
        for option in options:
            o, lse = decode_attention(q, rows[0], **option)
            for i in range(len(rows)):
                want = whole(q[i, 0], keys[i], values[i], **option)
                torch.testing.assert_close((o[i, 0], lse[i, :, 0]), want, rtol=1e-12, atol=1e-12)
        assert cp.comm.bytes_sent - sent == len(options) * len(rows) * H * (V + 1) * 8 * (cp.size - 1)
        o = decode_attention(q, rows[1].joined(), **option).o
        for i in range(len(rows)):
            latent, turned = halves(keys[i])
            want = whole(q[i, 0], torch.cat([latent, turned], -1), latent, **option)[0]
            torch.testing.assert_close(o[i, 0], want, rtol=1e-12, atol=1e-12)
    one = rows.chosen([3])  # the only one: where it is
    for x, y in ((one[0], rows[0]), (one[1].joined(), rows[1].joined())):
        torch.testing.assert_close(decode_attention(q[3:], x, softcap=2.0).o, decode_attention(q, y, softcap=2.0).o[3:])
    total = sum(LENGTHS) + 7 * len(LENGTHS)
    everywhere = cp.comm.all_gather(torch.tensor([rows.nbytes])).wait()
    assert int(everywhere.sum()) == total * (HK * (K + V) + 6) * 8
    assert int(everywhere.max() - everywhere.min()) <= 6 * len(LENGTHS) * (HK * (K + V) + 6) * 8
    del rows, one, x, y
    assert store.nbytes == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_token_over_the_keys_of_all_ranks(ranks, size):
    ranks.run(size, check_decoding)


def check_latents(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    L, R, D, n = 8, 2, 3, 11
    w_uk, w_uv, latents, q = drawn(1, H, D, L), drawn(2, H, V, L), drawn(3, n, L + R), drawn(4, 1, 1, H, D + R)
    store, layout = KeyStore([KeySize(1, L + R, 0)], cp, dtype=torch.float64, block=BLOCK), cp.layout(n - 1)
    rows = store.open(1).extended(layout)
    rows[0].put(layout.shard(latents[None, :-1, None]))
    rows = rows.advanced()
    rows[0].put(latents[None, -1:, None])
    o, lse = decode_latents(q, rows[0], w_uk, w_uv)
    k = torch.cat([torch.einsum("sl,hdl->shd", latents[:, :L], w_uk), latents[:, None, L:].expand(-1, H, -1)], -1)
    want = whole(q[0, 0], k, torch.einsum("sl,hvl->shv", latents[:, :L], w_uv))
    torch.testing.assert_close((o[0, 0], lse[0, :, 0]), want, rtol=1e-12, atol=1e-12)


def test_latents(ranks):
    ranks.run(2, check_latents)


def q_of(q: Tensor, i: int, length: int) -> Tensor:
    """Queries of a sequence of which the last is row i of ``q [N, 1, H, K]``."""
    return q[i].expand(length, -1, -1)[None]


def check_choice(rank: int) -> None:
    """Sequences that were read split and have been decoded, one of a token among them: blocks of each key head, and
    latents that an index picks."""
    cp, n = ContextParallel(group(), scan="ring"), (37, 9, 1)
    store = KeyStore([KeySize(HK, K, V), KeySize(1, 6, 0), KeySize(1, 4, 0)], cp, dtype=torch.float64, block=BLOCK)
    shapes = ((HK, K), (HK, V), (1, 6), (1, 4))
    tensors = [[drawn(7 * i + j, m + 5, *s) for j, s in enumerate(shapes)] for i, m in enumerate(n)]
    parts = []
    for x, m, kind in zip(tensors, n, ("zigzag", "striped", "contiguous")):
        layout = cp.layout(m, kind)
        k, v, latent, index = (layout.shard(t[None, :m]) for t in x)
        parts.append(store.open(1).extended(layout))
        parts[-1][0].put(k, v)
        parts[-1][1].put(latent)
        parts[-1][2].put(index)
    rows = KeyRows.joined(parts)
    for t in range(5):
        rows = rows.advanced()
        k, v, latent, index = (torch.stack([x[j][m + t] for x, m in zip(tensors, n)])[:, None] for j in range(4))
        rows[0].put(k, v)
        rows[1].put(latent)
        rows[2].put(index)
    q, iq, w = drawn(50, 3, 1, H, K), drawn(51, 3, 1, 2, 4), drawn(52, 3, 1, 2)
    chosen = torch.tensor([[[0, 16, 40], [4, 36, -1]], [[12, 0, 8], [4, -1, -1]], [[0, 4, -1], [-1, 4, 0]]])
    o = decode_attention(q, rows[0], chosen=chosen[:, None], block=4).o
    found, of_blocks = decode_index(iq, w, rows[2], 7), decode_blocks(q, rows[0], 4, 3)
    want_blocks = [block_index(q_of(q, i, len(x[0])), x[0][None], 4, 3).places[0, -1] for i, x in enumerate(tensors)]
    assert torch.equal(of_blocks.places[:, 0], torch.stack(want_blocks))
    w_uk, w_uv, ql = drawn(53, H, 3, 4), drawn(54, H, V, 4), drawn(55, 3, 1, H, 5)
    latents = decode_latents(ql, rows[1], w_uk, w_uv, chosen=found.places).o
    for i, (k, v, latent, index) in enumerate(tensors):
        for h in range(H):
            g = h // (H // HK)
            at = [p for c in chosen[i, g].tolist() if c >= 0 for p in range(c, c + 4) if p < len(k)]
            p = (k[at, g] @ q[i, 0, h] * K**-0.5).softmax(0)
            torch.testing.assert_close(o[i, 0, h], p @ v[at, g], rtol=1e-12, atol=1e-12)
        scores = torch.relu(index[:, 0] @ iq[i, 0].mT) @ w[i, 0]
        best = scores.topk(min(7, len(scores)))
        places = found.places[i, 0, 0, : len(best.indices)].long()
        torch.testing.assert_close(scores[places], best.values, rtol=1e-12, atol=1e-12)
        assert len(set(places.tolist())) == len(places)
        assert (found.places[i, 0, 0, len(places) :] == -1).all()
        c, r = latent[places, 0].split([4, 2], -1)
        s = (torch.einsum("hd,hdl,sl->hs", ql[i, 0, :, :3], w_uk, c) + ql[i, 0, :, 3:] @ r.mT) * 5**-0.5
        want = torch.einsum("hs,sl,hvl->hv", s.softmax(1), c, w_uv)
        torch.testing.assert_close(latents[i, 0], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_one_token_over_the_keys_it_has_chosen(ranks, size):
    ranks.run(size, check_choice)


def check_reading(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    q, k, v = drawn(1, 2, 40, H, K), drawn(2, 2, 40, HK, K), drawn(3, 2, 40, HK, V)
    for option in ({}, {"window": 9}, {"window": 9, "softcap": 2.0}, {"softcap": 2.0, "sinks": drawn(4, H)}):
        store, begin = KeyStore([KeySize(HK, K, V)], cp, dtype=torch.float64, block=BLOCK), 0
        rows = store.open(2)
        for end, kind in ((17, "zigzag"), (18, "zigzag"), (40, "contiguous")):
            layout = cp.layout(end - begin, kind)
            rows = rows.extended(layout)
            mine = [layout.shard(x[:, begin:end]) for x in (q, k, v)]
            if "softcap" in option:
                rows[0].put(*mine[1:])
                new = attention(*mine, window=(option.get("window", -1), -1), softcap=2.0, layout=layout)
                o = with_earlier(mine[0], new, rows[0], layout, scale=K**-0.5, **option).o
            else:
                o = read_attention(*mine, rows[0], layout, **option).o
            for t, token in enumerate(layout.tokens().tolist()):
                at = begin + token
                want = torch.stack([whole(q[b, at], k[b, : at + 1], v[b, : at + 1], **option)[0] for b in range(2)])
                torch.testing.assert_close(o[:, t], want, rtol=1e-12, atol=1e-12)
            begin = end


@pytest.mark.parametrize("size", [1, 3])
def test_more_tokens_over_the_keys_of_all_ranks(ranks, size):
    ranks.run(size, check_reading)


def test_sequences_that_begin_alike_share_blocks():
    store = KeyStore([KeySize(1, 2, 2)], block=4)
    row = store.open(1)

    def more(row: KeyRows, x: float) -> KeyRows:
        row = row.advanced()
        row[0].put(*(torch.full((1, 1, 1, 2), x) for _ in range(2)))
        return row

    for t in range(6):
        row = more(row, t)
    one, two = more(row, 10), more(row, 20)
    assert [x.held[0].extents[0][:2] for x in (one, two)] == [(0, 0)] * 2  # the full block is one
    assert one.held[0].extents != two.held[0].extents
    seen = [
        torch.cat([x[0].views(s)[0][:, 0, 0] for s in x.held[0].spans(0, x.held[0].here)]).tolist()
        for x in (row, one, two)
    ]
    assert seen == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 10], [0, 1, 2, 3, 4, 5, 20]]
    del row, one
    assert sum(map(bool, store.pages.slabs[0].shares)) == 2
    store.reserve(5)
    assert store.pages.slabs[1].shares == [0, 0]
    del two
    assert list(store.pages.slabs) == [1]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="sizes: expected a KeySize"):
        KeyStore([KeySize(0, 1, 1)])
    wrong = dict(block=0, cp="cp", dtype="float32", device="cpu")
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            KeyStore([KeySize(1, 1, 1)], **{name: value})
    for sizes in (None, 3, KeyStore):
        with pytest.raises(ArgumentError, match=r"^sizes: expected a Sequence"):
            KeyStore(sizes)
    store = KeyStore([KeySize(1, 2, 2)])
    for count in (-1, 1.0, None):
        with pytest.raises(ArgumentError, match=r"^count: expected an int"):
            store.open(count)
    rows = store.open(1).advanced()
    for k in (torch.zeros(1, 1, 2, 2), torch.zeros(3, 1, 1, 2), torch.zeros(0, 1, 1, 2), [0.0], None):
        with pytest.raises(ArgumentError, match=r"k: expected \[B, T, 1, 2\]"):
            rows[0].put(k, torch.zeros(1, 1, 1, 2))
    for call in (decode_attention, lambda q, state: read_attention(q, q, q, state, None)):
        with pytest.raises(ArgumentError, match=r"^state: expected a LayerKeys"):
            call(torch.zeros(1, 1, 1, 2), None)
    with pytest.raises(ArgumentError, match=r"^q: expected"):
        read_attention(None, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), rows[0], None)
    with pytest.raises(ArgumentError, match="q: expected 2 channels"):
        decode_attention(torch.zeros(1, 1, 1, 3), rows[0])
