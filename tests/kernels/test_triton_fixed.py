"""Kernels of which a row's or a block's bits depend on it alone, interpreted: the same bits beside other rows, in other
orders and cut elsewhere. On GPUs: tests/gpu/test_same_bits.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.interpreter import compute_bf16, interpreted

interpreted()
compute_bf16()

from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels import gpu  # noqa: E402
from ring_la.kernels.fixed import conv, library, weight, weight_sum  # noqa: E402
from ring_la.kernels.fixed.bounds import GROUP, bounds_of  # noqa: E402
from ring_la.kernels.fixed.column_sum import column_sums, largest_of_columns, whole_sums  # noqa: E402
from ring_la.kernels.fixed.product import row_product  # noqa: E402
from ring_la.kernels.fixed.weight import BlockPlaces, block_sums  # noqa: E402
from ring_la.kernels.in_order import Pieces, forward, gradients, reason_against  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs  # noqa: E402

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(HERE)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("N", [72, 80], ids=["by address", "by descriptor"])
def test_a_row_of_a_product_does_not_depend_on_the_others(transposed, N):
    x, w, bias = bf16(150, 80), bf16(N, 80, seed=1), bf16(N, seed=2)
    given = w if transposed else w.T.contiguous()
    whole = row_product(x, given, bias, transposed=transposed)
    assert torch.equal(row_product(x[131:134], given, bias, transposed=transposed), whole[131:134])
    exact = x.double() @ w.double().T + bias.double()
    assert (whole.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("odd", ["nothing", "numbers of rows", "places of rows", "few rows"])
def test_a_library_is_asked_for_what_it_does_alike(odd, monkeypatch):
    """A library that computes some numbers of rows otherwise is called with others; one that computes rows by their
    places, or few rows otherwise than many, is not called."""
    of, sizes = library._call, []

    def called(x, w, bias, transposed):
        sizes.append(len(x))
        y = of(x.float(), w.float(), None if bias is None else bias.float(), transposed)
        if odd == "numbers of rows" and len(x) not in (library.ROWS, *library.LARGE):
            y = y * (1 + 2**-6)
        if odd == "few rows" and len(x) <= library.ROWS:
            y = y * (1 + 2**-6)
        if odd == "places of rows":
            y = y * (1 + torch.arange(len(x))[:, None] % 2 * 2**-6)
        return y.to(x.dtype)

    monkeypatch.setattr(library, "_call", called)
    monkeypatch.setattr(library, "_found", {})
    x, w, bias = bf16(3000, 128), bf16(136, 128, seed=1), bf16(136, seed=2)
    whole = library.library_product(x, w, bias, True)
    if odd in ("places of rows", "few rows"):
        assert whole is None
        return
    sizes.clear()
    assert torch.equal(library.library_product(x, w, bias, True), whole)
    assert sizes == ([3000] if odd == "nothing" else [2048, 512, 512])
    for rows in (slice(7, 8), slice(100, 700)):
        assert torch.equal(library.library_product(x[rows].contiguous(), w, bias, True), whole[rows])
    assert library.library_product(x, w[:64], None, True) is None


def test_blocks_products_add_in_any_order(monkeypatch):
    """dW of ragged blocks, some of tiny numbers; its error is below what rounding it to bf16 makes of it."""
    dy, x = bf16(230, 32), bf16(230, 48, seed=1)
    dy[64:70] *= 1e-3
    x[:, 7] *= 100
    places = torch.tensor([[0, 64], [64, 70], [70, 134], [134, 198], [198, 230]], dtype=torch.int32, device=HERE)
    bounds = bounds_of(dy, places), bounds_of(x, places)

    def sums(dtype, full, ragged):
        return block_sums(dy, x, BlockPlaces(places[full], places[ragged]), bounds, dtype)

    whole = sums(torch.float32, [0, 2, 3], [1, 4])
    assert torch.equal(sums(torch.float32, [], [3, 0, 4, 2, 1]), whole)  # not by descriptor
    for dtype in (torch.float32, torch.float64):
        assert torch.equal((sums(dtype, [2], [4]) + sums(dtype, [3, 0], [1])).float(), whole)
    monkeypatch.setattr(weight, "GROUP", 2)
    assert torch.equal(sums(torch.bfloat16, [0, 2, 3], [1, 4]), whole.bfloat16())
    exact = dy.double().T @ x.double()
    scale = torch.linalg.vector_norm(exact) / exact.numel() ** 0.5
    rounding = torch.linalg.vector_norm(exact.bfloat16().double() - exact) / exact.numel() ** 0.5
    assert torch.linalg.vector_norm(whole.double() - exact) / exact.numel() ** 0.5 <= rounding < 2**-8 * scale


def test_as_many_blocks_as_go_together_do_not_overflow():
    """Blocks' products just below their bound, as many as are added before the sum is read off."""
    value = 2**-3 * 0.98828125  # 64 of it have a norm of 0.988, with the margin below 1
    x = torch.full((GROUP * 64, 16), value, device=HERE).bfloat16()
    x[:, 1] *= -1
    starts = torch.arange(0, len(x), 64, dtype=torch.int32, device=HERE)
    places = torch.stack([starts, starts + 64], 1)
    got = block_sums(x, x, BlockPlaces(places, places[:0]), (bounds_of(x, places),) * 2, torch.float32)
    exact = x.double().T @ x.double()
    assert (got.double() - exact).abs().max() <= GROUP * 2**-15


def blocks_of(rows: int) -> torch.Tensor:
    starts = torch.arange(0, rows, 64, dtype=torch.int32, device=HERE)
    return torch.stack([starts, starts + 64], 1)


def test_a_large_token_leaves_others_their_bits():
    """Blocks' products are rounded to what their sum needs, not to what the largest of them would need as often."""
    dy, x = bf16(16 * 64, 16), bf16(16 * 64, 16, seed=1)
    x[5, 3] = 3000
    places = blocks_of(len(x))
    got = block_sums(
        dy, x, BlockPlaces(places, places[:0]), (bounds_of(dy, places), bounds_of(x, places)), torch.float32
    )
    assert (got.double() - dy.double().T @ x.double()).abs().max() <= 16 * 2**-5


@pytest.mark.parametrize(("slots", "group", "run"), [(1, 128, False), (4, 4, False), (4, 2, True), (8, 128, True)])
def test_tensor_cores_add_blocks_halves(slots, group, run, monkeypatch):
    """Interpreted, sums are rounded otherwise: that every token of the blocks is in them, once, is what this shows, of
    whole tiles and of tiles that programs share (none of six, two, two, all)."""
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: slots)
    monkeypatch.setattr(weight_sum, "GROUP", group)
    dy, x = bf16(700, 272), bf16(700, 272, seed=1)
    starts = range(70, 646, 64) if run else (70, 0, 134, 198, 301)
    places = torch.tensor([[a, a + 64] for a in starts], dtype=torch.int32).to(HERE)
    bounds, out = (bounds_of(dy, places), bounds_of(x, places)), torch.full((272, 272), float("nan"), device=HERE)
    exact = sum(dy[a:b].double().T @ x[a:b].double() for a, b in places.tolist())
    for wide in (torch.float32, torch.float64):
        weight_sum.add_full_blocks(dy, x, places, run, bounds, out, wide)
        assert (out - exact).abs().max() <= len(places) * 2**-7


@pytest.mark.parametrize(
    ("tiles", "count"), [(1, 1), (40, 256), (200, 256), (264, 3), (540, 16), (600, 256), (1070, 255)]
)
def test_every_block_of_every_tile_is_a_programs(tiles, count):
    whole, split, chunks, part = weight_sum.division(tiles, count, 132)
    assert whole + split == tiles
    assert not split or (chunks - 1) * part < count <= chunks * part


@pytest.mark.parametrize("adds", ["on the grid", "to nearest", "coarsely"])
def test_a_device_is_asked_whether_it_adds_exactly(adds, monkeypatch):
    def add(dy, x, places, run, bounds, out, wide):
        total = torch.zeros_like(out)
        for start, stop in places.tolist():
            part = dy[start:stop].double().T @ x[start:stop].double()
            if adds != "to nearest":
                grid = 2.0 ** (-14 if adds == "on the grid" else 0)
                part = (part / grid).round() * grid
            total += part.float()
        out.copy_(total)

    monkeypatch.setattr(weight_sum, "add_full_blocks", add)
    dy, x = weight_sum._drawn(torch.bfloat16, torch.device(HERE), 24)
    assert weight_sum._tried(dy[:, :16], x[:, :16]) == (adds == "on the grid")


def test_columns_add_in_any_order():
    x = bf16(300, 20).float() * torch.logspace(-6, 6, 20, device=HERE)
    largest = largest_of_columns(x)
    whole = column_sums(x, largest, 24)
    assert torch.equal(column_sums(x.flip(0), largest, 24), whole)
    assert torch.equal(whole_sums(x, 24), whole)
    assert torch.equal(column_sums(x[:70], largest, 24) + column_sums(x[70:], largest, 24), whole)
    torch.testing.assert_close(whole, x.double().sum(0), rtol=1e-6, atol=0)
    x[3, 4] = float("nan")
    assert column_sums(x, largest_of_columns(x), 24).isfinite().sum() == whole_sums(x, 24).isfinite().sum() == 19


@pytest.mark.parametrize(
    "rule",
    ["delta_scalar", "delta_diagonal", "additive_diagonal", "dplr_diagonal", "additive_scalar", "additive_none"],
)
def test_states_pass_from_chunk_to_chunk(rule):
    """Two documents at once are each by itself, and one is what its two parts are, of which the second gets the state
    of the first one, and the first the gradient of the second."""
    rule, T, H, D = Rule.parse(rule), 160, 2, 32
    q, k, v, a, b, do = (bf16(1, T, H, D, seed=s) / 6 for s in range(6))
    g = -torch.rand(1, T, H, D, generator=torch.Generator().manual_seed(7)).to(HERE)
    given = Inputs(q, k, v)
    if rule.decay == "scalar":
        given = given._replace(g=g[..., 0])
    if rule.decay == "diagonal":
        given = given._replace(g=g)
    if rule.write == "delta":
        given = given._replace(beta=torch.sigmoid(do[..., 0].float()))
    if rule.write == "dplr":
        given = given._replace(a=a, b=b)
    assert not reason_against(rule, given, T)

    def run(x, cu, S, dS, do):
        pieces = Pieces.of(cu[-1], torch.tensor(cu, dtype=torch.int32, device=HERE))
        out = forward(rule, x, pieces, 0.2, S, True)
        back = gradients(rule, x, pieces, 0.2, Backward(S, do, out.saved), dS)
        return out.o, out.leaving, back.inputs, back.entering

    def cut(start, stop):
        return Inputs(*(None if t is None else t[:, start:stop].contiguous() for t in given)), do[:, start:stop]

    S = bf16(1, 2, H, D, D, seed=9).float()
    o, leaving, grads, entering = run(given, (0, 100, T), S, S / 2, do)
    first, of_first = cut(0, 64)
    then, of_then = cut(64, 100)
    o1, between, _, _ = run(first, (0, 64), S[:, :1], S[:, :1], of_first)
    o2, end, grads2, back = run(then, (0, 36), between, S[:, :1] / 2, of_then)
    grads1, start = run(first, (0, 64), S[:, :1], back, of_first)[2:]
    assert torch.equal(torch.cat([o1, o2], 1), o[:, :100])
    assert torch.equal(end, leaving[:, :1])
    assert torch.equal(start, entering[:, :1])
    for whole, one, other in zip(grads, grads1, grads2):
        assert whole is None or torch.equal(torch.cat([one, other], 1), whole[:, :100])


@pytest.mark.parametrize("strength", [0.02, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("rule", ["delta_diagonal", "additive_diagonal", "dplr_diagonal", "erase_diagonal"])
def test_a_row_does_not_depend_on_later_tokens(rule, strength):
    """A decoder reads the first tokens of a chunk, a forward pass all of them. Here the first chunk's tokens are cut
    off behind n, or others stand there, of other decays."""
    rule, H, D = Rule.parse(rule), 2, 32
    q, k, v, a, b = (bf16(1, 64, H, D, seed=s) / 6 for s in range(5))
    g = -strength * torch.rand(1, 64, H, D, generator=torch.Generator().manual_seed(7)).to(HERE)
    beta = torch.sigmoid(v[..., 0].float()) if rule.write in ("delta", "erase") else None
    given = Inputs(q, k, v, g, beta, *{"dplr": (a, b), "erase": (a,)}.get(rule.write, ()))
    S = bf16(1, 1, H, D, D, seed=9).float()

    def o(x):
        pieces = Pieces.of(x.v.shape[1], torch.tensor([0, x.v.shape[1]], dtype=torch.int32, device=HERE))
        return forward(rule, x, pieces, 0.2, S, False).o

    whole = o(given)
    assert whole.isfinite().all()
    for n in (1, 2, 17, 31, 32, 33, 63):
        assert torch.equal(o(Inputs(*(None if t is None else t[:, :n].contiguous() for t in given))), whole[:, :n]), n
    other = Inputs(*(None if t is None else torch.cat([t[:, :33], 5 * t[:, 33:].flip(1)], 1) for t in given))
    assert torch.equal(o(other)[:, :33], whole[:, :33])


@pytest.mark.parametrize("ends", [False, True], ids=["", "with final rows"])
def test_a_convolution_is_its_parts(ends):
    """Two documents; the first one's last block, of 2 tokens, by itself as on another rank: the gradients of its lead
    are what the rows before it get. All beside fp64."""
    D, W = 40, 4
    x, do, weight, bias = bf16(150, D), bf16(150, D, seed=1), bf16(D, W, seed=2), bf16(D, seed=3)
    lead, dends = bf16(2, W - 1, D, seed=4), bf16(2, W - 1, D, seed=5) if ends else None
    table = [[0, 64, 0, 130, 0], [64, 128, 0, 130, 0], [128, 130, 0, 130, 0], [130, 150, 130, 150, 1]]

    def run(rows, lead, dends, table):
        table = torch.tensor(table, dtype=torch.int32, device=HERE)
        o = conv.block_conv(x[rows], lead, weight, bias, table, True)
        return o, *conv.block_conv_gradients(do[rows], dends, x[rows], lead, weight, bias, table, True)

    o, dx, dlead, sums = run(slice(0, 150), lead, dends, table)
    o1, dx1, _, sums1 = run(slice(0, 128), lead[:1], None, [[0, 64, 0, 128, 0], [64, 128, 0, 128, 0]])
    o2, dx2, back, sums2 = run(slice(128, 130), x[None, 125:128], dends[:1] if ends else None, [[0, 2, 0, 2, 0]])
    if ends:
        back[0, 2:] += dends[0, :1]
    dx1[125:] += back[0]
    assert torch.equal(torch.cat([o1, o2]), o[:130])
    assert torch.equal(torch.cat([dx1, dx2]), dx[:130])
    assert torch.equal(torch.cat([sums1, sums2]), sums[:3])
    given = [t.double().requires_grad_() for t in (x, lead, weight, bias)]
    led = [torch.cat([given[1][p], given[0][a:b]]) for p, (a, b) in enumerate(((0, 130), (130, 150)))]
    made = [F.silu(F.conv1d(y.T[None], given[2][:, None], given[3], groups=D)[0].T) for y in led]
    last = [y[1 - W :] for y in led]
    wanted = torch.autograd.grad(
        [*made, *(last if ends else [])],
        given,
        [do[:130].double(), do[130:].double(), *(dends.double() if ends else [])],
    )
    whole = sums.double().sum(0)
    for got, exact in zip((torch.cat(made), dx, dlead, whole[:W].T, whole[W]), (o.double(), *wanted)):
        assert (got - exact).abs().max() <= 2**-7 * exact.abs().max()
