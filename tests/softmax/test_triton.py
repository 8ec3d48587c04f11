"""The Triton kernels under Triton's interpreter, against the dense reference and the PyTorch backend.

The GPU's own check is tests/gpu/test_attention.py.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from ring_la.layout import Layout
from ring_la.softmax.backends import BACKENDS, QueryRows
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.geometry.placement import WholePlacement
from ring_la.softmax.merging import Gradients, Partial, Sum, one_pass, row_sums
from ring_la.softmax.scores import Scores
from ring_la.softmax.sums import PARTS, with_sums
from tests.support.attention_cases import DOCUMENTS, FEATURES, draw, error, finite, truth
from tests.support.interpreter import compute_bf16, interpreted

interpreted()
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("GPUs have a check of their own", allow_module_level=True)

from ring_la.softmax import attention, forgetting_attention  # noqa: E402
from ring_la.softmax.backends.canonical import Canonical  # noqa: E402
from ring_la.softmax.backends.triton import CanonicalTriton, launch, plan, span_launch, spans, table  # noqa: E402
from ring_la.softmax.merging import fused  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", True)
    monkeypatch.setattr(plan, "ALIGNED", 32)
    for name, (rows, keys) in dict(FORWARD=(32, 16), BACKWARD_KEYS=(16, 32), BACKWARD_QUERIES=(32, 32)).items():
        monkeypatch.setattr(table, name, {w: table.TileSettings(rows, keys, 4, 2) for w in getattr(table, name)})


@pytest.mark.parametrize(
    ("documents", "feature"),
    [*(("uneven", f) for f in FEATURES), *(("packed", f) for f in ("causal", "full", "window", "all", "all rear"))],
)
def test_every_feature_is_the_reference(documents, feature):
    case, want, cu = draw(documents, feature), truth(documents, feature), DOCUMENTS[documents][1]
    leaves = {n: t.float().requires_grad_() for n, t in case.tensors.items()}
    cu = None if cu is None else torch.tensor(cu)
    out = attention(**leaves, **case.keywords, cu_seqlens=cu, backend="triton")
    loss = (out.o * case.do).sum() + (finite(out.lse) * case.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    got = dict(o=out.o, lse=out.lse) | {f"d{n}": g for n, g in zip(leaves, grads)}
    errors = {n: error(g, want[n]) for n, g in got.items()}
    assert all(e < 2e-5 for e in errors.values()), errors


def block(backend: str, scores: Scores, tensors, pair: Pair) -> list[torch.Tensor]:
    """(o, lse) over two blocks of keys, and the gradients of the first."""
    q, k, v, do = tensors
    out = Partial((*q.shape[:3], v.shape[3]), q.dtype, q.device)
    for _ in range(2):  # the second call merges
        BACKENDS[backend].forward(q, k, v, scores, pair, out)
    o, lse = out.result()
    grads, x = Gradients.of(q, k, v), QueryRows(q, o, do, lse, row_sums(do, o, None))
    for _ in range(2):  # the second call adds
        BACKENDS[backend].backward(x, k, v, scores, pair, grads)
    return [o, lse, *(s.result(torch.float32) for s in (grads.dq, grads.dk, grads.dv))]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("cu", [None, (0, 7, 7, 90, 91, 200)])
def test_blocks_of_any_layout(kind, cu):
    torch.manual_seed(0)
    cpu, layout = torch.device("cpu"), Layout(200, kind, 4, cu_seqlens=cu)
    scores = Scores(0.3, 2.0, 60, 0, torch.rand(1, 2), 0.3, torch.tensor(2**61 + 12345))
    for rank, owner in ((1, 1), (2, 0), (0, 3)):
        rows, keys = (Tokens.of_ranks(layout, [r], cpu) for r in (rank, owner))
        shapes = ((1, len(rows), 2, 8), (1, len(keys), 1, 8), (1, len(keys), 1, 12), (1, len(rows), 2, 12))
        tensors, pair = [torch.randn(*s) for s in shapes], Pair(rows, keys, scores.reach)
        for got, want in zip(*(block(b, scores, tensors, pair) for b in ("triton", "torch"))):
            assert error(got, want) < 1e-5


@pytest.fixture
def of_spans(monkeypatch):
    """Kernels of spans, small tiles, documents of 40 rows long ones; how often they are launched."""
    for name, (rows, keys) in dict(SPANS_FORWARD=(32, 16), SPANS_KEYS=(16, 32), SPANS_QUERIES=(32, 32)).items():
        monkeypatch.setattr(table, name, {64: table.TileSettings(rows, keys, 4, 2)})
    monkeypatch.setattr(spans, "ALONE", 40)
    seen, launched = [], span_launch.OfSpans._launch
    monkeypatch.setattr(span_launch.OfSpans, "_launch", lambda self, *a: (seen.append(self), launched(self, *a)))
    return seen


@pytest.mark.parametrize("reach", [(None, 0), (None, None), (5, 3)])
@pytest.mark.parametrize(("kind", "cu"), [("zigzag", None), ("balanced", (0, 7, 7, 90, 91, 198)), ("striped", None)])
def test_spans_of_any_layout(kind, cu, reach, of_spans):
    """Rows off a boundary, grouped heads, values wider than keys; blocks that spans do not describe go elsewhere."""
    torch.manual_seed(0)
    cpu, layout = torch.device("cpu"), Layout(198, kind, 4, cu_seqlens=cu)
    scores = Scores(0.3, left=reach[0], right=reach[1])
    for rank, owner in ((1, 1), (2, 0), (0, 3)):
        rows, keys = (Tokens.of_ranks(layout, [r], cpu) for r in (rank, owner))
        shapes = ((1, len(rows), 2, 8), (1, len(keys), 1, 8), (1, len(keys), 1, 12), (1, len(rows), 2, 12))
        tensors, pair = [torch.randn(*s) for s in shapes], Pair(rows, keys, scores.reach)
        for got, want in zip(*(block(b, scores, tensors, pair) for b in ("triton", "torch"))):
            assert error(got, want) < 1e-5
    assert of_spans


def test_spans_of_documents_that_only_the_device_knows(of_spans):
    torch.manual_seed(0)
    cpu, cu, scores = torch.device("cpu"), (0, 7, 7, 90, 91, 198), Scores(0.3, left=50, right=0)
    tensors = [torch.randn(1, 198, h, 8) for h in (2, 1, 1, 2)]
    known, unknown = Tokens.whole(198, cpu, cu), Tokens.packed(198, torch.tensor(cu))
    want = block("torch", scores, tensors, Pair(known, known, scores.reach))
    for got, exact in zip(block("triton", scores, tensors, Pair(unknown, unknown, scores.reach)), want):
        assert error(got, exact) < 1e-5
    assert of_spans


def test_spans_are_for_scores_of_order_alone(of_spans):
    """A softcap, a scale below zero and joint keys go to the general kernels."""
    q = torch.randn(1, 45, 2, 8)
    joint = dict(joint="front", joint_k=q[:, :5], joint_v=q[:, :5])
    for more, launches in ((dict(softcap=2.0), 0), (dict(scale=-0.5), 0), (joint, 1), ({}, 1)):
        of_spans.clear()
        want = attention(q, q, q, backend="torch", **more).o
        assert error(attention(q, q, q, backend="triton", **more).o, want) < 1e-5
        assert len(of_spans) == launches


@pytest.mark.parametrize("by_spans", [False, True])
def test_gradients_of_sums_are_not_rounded(by_spans, request):
    """Forgetting attention in bf16: g's gradient is a sum along the sequence of what nearly cancels."""
    compute_bf16()
    seen = request.getfixturevalue("of_spans") if by_spans else [None]
    rng = torch.Generator().manual_seed(1)
    x = {n: torch.randn(1, 256, 2, 64, generator=rng).bfloat16().requires_grad_() for n in "qkv"}
    x["g"] = torch.nn.functional.logsigmoid(torch.randn(1, 256, 2, generator=rng) + 3).requires_grad_()
    do = torch.randn(1, 256, 2, 64, generator=rng)
    results = []
    for backend in ("triton", "torch", "reference"):
        out = forgetting_attention(**x, backend=backend)
        loss = (out.o.float() * do).sum() + (out.lse * do[..., 0].mT).sum()
        results.append([out.o, *torch.autograd.grad(loss, list(x.values()))])
    for got in results[:2]:
        assert max(error(g, w) for g, w in zip(got, results[2])) < 4e-3
    assert seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_put_beside_channels_by_one_kernel(dtype):
    """The same bits as PyTorch's own operations, of tensors that lie as part of a projection."""
    from ring_la.kernels.fused import sum_channels_kernel

    rng = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 19, 3, 48, generator=rng).to(dtype).split(24, -1)
    c = -torch.rand(2, 3, 19, generator=rng, dtype=torch.float64).cumsum(2).transpose(1, 2) * 50
    want = with_sums(q, k, c, exact=True)
    got = sum_channels_kernel.forward(q, k, c, PARTS[dtype], want[0].shape[-1])
    for g, w in zip(got, want):
        assert torch.equal(g, w)


def test_where_joint_keys_stand_is_kept_once():
    """Each call with joint keys left its lists with the rows, as long as calls of that length came."""
    q = torch.randn(1, 45, 2, 8)
    for _ in range(3):
        attention(q, q, q, joint="front", joint_k=q[:, :5], joint_v=q[:, :5], backend="triton")
    (rows,) = WholePlacement.of(45, 45, q.device, None).rows
    assert len(rows.met) == 2


def test_parts_in_one_pass(monkeypatch):
    """The fused merge and sum of parts of some rows, strided and in other dtypes, against PyTorch's operators."""
    torch.manual_seed(0)
    spans = [(0, 37), (5, 30), (0, 12), (36, 37), (12, 37), (3, 4), (0, 37), (20, 25)]  # more than one launch takes
    out, total, shape = [], [], (2, 37, 3, 12)
    for fuses in (False, True):
        monkeypatch.setattr(one_pass, "fuses", lambda device, dtype, fuses=fuses: fuses)
        rng = torch.Generator().manual_seed(0)
        partial, added = (
            Partial(shape, torch.float32, torch.device("cpu")),
            Sum(shape, torch.float32, torch.device("cpu")),
        )
        for n, (a, b) in enumerate(spans):
            x = torch.randn(2, 12, 3, b - a, generator=rng).permute(0, 3, 2, 1)
            lse = torch.randn(2, b - a, 3, generator=rng).mT
            lse[:, :, :1] = -torch.inf  # rows that see nothing
            x = x.bfloat16() if n % 2 else x
            partial.add(x * (lse > -torch.inf).mT.unsqueeze(-1), lse, slice(a, b))
            added.add(x, slice(a, b))
        out.append(partial.result())
        total.append(added.result(torch.float32))
    for got, want in zip((*out[1], total[1]), (*out[0], total[0])):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(fused.row_sums(out[0][0], total[0]), (out[0][0] * total[0]).sum(-1).mT)


def test_gradients_of_a_block_come_in_the_inputs_dtype():
    """What travels to a key's owner is no wider than the key: memory and bytes of a split backward."""
    torch.manual_seed(0)
    rows = Tokens.whole(40, torch.device("cpu"))
    q, k, v, do = (torch.randn(1, 40, h, 16).half() for h in (4, 2, 2, 4))
    out, scores = Partial(q.shape, q.dtype, q.device), Scores(0.25, right=0)
    pair = Pair(rows, rows, scores.reach)
    BACKENDS["triton"].forward(q, k, v, scores, pair, out)
    o, lse = out.result()
    x = QueryRows(q, o, do, lse, row_sums(do, o, None))
    grads, want = Gradients.of(q, k, v), Gradients.of(q, k, v)
    for name, into in (("triton", grads), ("torch", want)):
        BACKENDS[name].backward(x, k, v, scores, pair, into)
    for got, exact in zip((grads.dq, grads.dk, grads.dv), (want.dq, want.dk, want.dv)):
        ((start, stop, part),) = got.stretches(torch.float16)
        assert (start, stop, part.dtype) == (0, 40, torch.float16)
        assert got.wide().dtype == torch.float32
        assert error(part, exact.wide()) < 1e-2
    assert not BACKENDS["triton"].sums_wide


def test_the_first_part_holds_the_result(monkeypatch):
    """Where it has all rows, others are put into theirs: nothing else is read or written; asked again, nothing is."""
    torch.manual_seed(0)
    shape, cpu, results = (2, 37, 3, 12), torch.device("cpu"), []
    spans_ = [slice(0, 37), slice(20, 30), slice(25, 29)]
    drawn = [(torch.randn(2, s.stop - s.start, 3, 12), torch.randn(2, 3, s.stop - s.start)) for s in spans_]
    for fuses in (False, True):
        monkeypatch.setattr(one_pass, "fuses", lambda device, dtype, fuses=fuses: fuses)
        partial, added, settled = (kind(shape, torch.float32, cpu) for kind in (Partial, Sum, Sum))
        held = [(x.clone(), lse.clone(), x.clone(), x.clone()) for x, lse in drawn]
        for (o, lse, dq, dk), rows in zip(held, spans_):
            partial.add(o, lse, rows)
            added.add(dq, rows)
            settled.add(dk, rows)
        for _ in range(2):
            got = [*partial.result(), added.result(torch.float32), settled.settled(torch.float32).result(torch.float32)]
            results.append([t.clone() for t in got])
            assert [a.data_ptr() == b.data_ptr() for a, b in zip(got[:3], held[0])] == [fuses] * 3
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])


@pytest.mark.parametrize("sums", [False, True], ids=["", "with running sums"])
@pytest.mark.parametrize(
    ("more", "walks"), [({}, True), ({"left": 40}, True), ({"right": None}, True), ({"softcap": 2.0}, False)]
)
def test_blocks_at_fixed_places_have_the_same_bits(sums, more, walks, monkeypatch):
    """What a document and its gradients are does not depend on its place, nor on which rows are at hand. (NumPy's
    products look at a row's place in a tile of 64, tensor cores do not.)"""
    launched, launch_of = [], span_launch.OfSpans._launch
    monkeypatch.setattr(span_launch.OfSpans, "_launch", lambda self, *a: (launched.append(a), launch_of(self, *a)))
    backend, H, D = CanonicalTriton(), 2, 16
    rng = torch.Generator().manual_seed(3)
    heads = (H, H, H, H) if sums else (H, 1, 1, H)
    one, other = ([torch.randn(1, n, h, D, generator=rng) for h in heads] for n in (260, 64))
    scores = Scores(0.3, **{"right": 0} | more)
    for part in (one, other) if sums else ():
        c = -torch.rand(1, part[0].shape[1], H, generator=rng, dtype=torch.float64).cumsum(1)
        part[0], part[1] = with_sums(part[0], part[1], c, exact=True)
        scores = Scores(0.3, **{"right": 0} | more, sums=D)

    def run(parts: list, rows: slice = slice(None)) -> list[torch.Tensor]:
        q, k, v, do = (torch.cat(x, 1) for x in zip(*parts))
        cu = [0, *itertools.accumulate(p[0].shape[1] for p in parts)]
        tokens = Tokens.whole(cu[-1], torch.device("cpu"), cu)
        q, do, mine = q[:, rows], do[:, rows], tokens.cut(*rows.indices(cu[-1])[:2])
        pair, out = Pair(mine, tokens, scores.reach), Partial(do.shape, q.dtype, q.device)
        backend.forward(q, k, v, scores, pair, out)
        o, lse = out.result()
        x = QueryRows(q, o, do, lse, backend.row_sums(do, o, None, mine))
        return [o, backend.query_gradients(x, k, v, scores, pair), *backend.key_gradients(x, k, v, scores, pair)]

    whole, turned = run([one, other]), run([other, one])
    assert len(launched) == 6 * walks
    for a, b in zip(whole, turned):
        assert torch.equal(a[:, :260], b[:, 64:])
    for a, b in zip(run([one, other], slice(64, 250))[:2], whole):
        assert torch.equal(a, b[:, 64:250])
    plain, tokens = Canonical(), Tokens.whole(260, torch.device("cpu"))
    (q, k, v, do), pair = one, Pair(tokens, tokens, scores.reach)
    expected = Partial(do.shape, torch.float32, torch.device("cpu"))
    plain.forward(q, k, v, scores, pair, expected)
    o, lse = expected.result()
    x = QueryRows(q, o, do, lse, plain.row_sums(do, o, None, tokens))
    wanted = o, plain.query_gradients(x, k, v, scores, pair), *plain.key_gradients(x, k, v, scores, pair)
    for got, want in zip(whole, wanted):
        kept = slice(D) if sums else slice(None)  # PyTorch's gives the gradients of sums in other channels
        torch.testing.assert_close(got[:, :260, :, kept], want[..., kept], rtol=1e-4, atol=1e-4)
