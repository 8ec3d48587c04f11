"""The public function: bad input named on every rank, second derivatives refused, compiled, autocast, backends."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ring_la
from ring_la import reference
from ring_la.softmax import attention, operator
from ring_la.softmax.backends import BACKENDS
from ring_la.softmax.call import AttentionCall
from ring_la.softmax.scores import Scores
from ring_la.softmax.tensors import Tensors
from tests.support.attention_cases import DOCUMENTS, FEATURES, draw, error, finite, truth
from tests.support.pool import group


def run(case, **keywords) -> dict[str, torch.Tensor]:
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    out = attention(**leaves, **case.keywords, **keywords)
    loss = (out.o * case.do).sum()
    if case.dlse.any():
        loss = loss + (finite(out.lse) * case.dlse).sum()
    return dict(o=out.o, lse=out.lse) | {
        f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())))
    }


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_on_one_device_is_the_reference(feature, backend):
    for documents, key_tokens in (("dense", None), ("packed", None), ("uneven", 131), ("uneven", 20)):
        cu = DOCUMENTS[documents][1]
        got = run(
            draw(documents, feature, key_tokens), cu_seqlens=None if cu is None else torch.tensor(cu), backend=backend
        )
        for n, want in truth(documents, feature, key_tokens).items():
            assert error(got[n], want) < 1e-9, (documents, n)


def test_long_rows_are_cut_into_strips():
    q, k, v = (torch.randn(1, 1300, 2, 8, dtype=torch.float64) for _ in range(3))
    for keywords in (dict(), dict(window=(100, -1)), dict(causal=False, window=(40, 700))):
        got, want = (attention(q, k, v, **keywords, backend=b) for b in ("torch", "reference"))
        assert error(got.o, want.o) < 1e-12
        assert error(got.lse, want.lse) < 1e-12


def both_ways(function, x: dict[str, torch.Tensor], **keywords) -> list[torch.Tensor]:
    """o, lse and the gradients of the tensors as they are, of a loss whose gradient of o has its channels apart."""
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    out = function(**leaves, **keywords)
    weights = torch.linspace(-1, 1, out.o.numel(), dtype=out.o.dtype).view(*out.o.shape[:2], -1, out.o.shape[2]).mT
    return [out.o, out.lse, *torch.autograd.grad((out.o * weights).sum(), list(leaves.values()))]


def plain(groups: int = 4) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randn(2, 23, h, 8, generator=rng) for n, h in (("q", 4), ("k", groups), ("v", groups))}


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_channels_need_not_stand_side_by_side(name):
    """PyTorch's kernel for the CPU reads its tensors as if they did."""
    x = plain()
    apart = x | {name: torch.stack([x[name], -x[name]], -1)[..., 0]}
    assert apart[name].stride(-1) == 2
    want = both_ways(reference.attention, {n: t.double() for n, t in x.items()})
    for keywords in (dict(), dict(backend="cpu_flash"), dict(backend="torch")):
        assert max(map(error, both_ways(attention, apart, **keywords), want)) < 1e-5


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_may_have_any_sign(scale):
    """PyTorch's kernel for the CPU makes NaN of hidden keys then."""
    x, keywords = plain(2), dict(scale=scale, window=(5, 0))
    for more in (keywords, dict(scale=scale), dict(scale=scale, causal=False)):
        want = both_ways(reference.attention, {n: t.double() for n, t in x.items()}, **more)
        o, lse, *gradients = both_ways(attention, x, **more)
        assert max(error(o, want[0]), error(lse, want[1])) < 1e-5
        assert all(torch.allclose(g.double(), w, atol=1e-5) for g, w in zip(gradients, want[2:]))
    with pytest.raises(ring_la.UnsupportedError, match=r"cpu_flash.*scale"):
        attention(**x, scale=scale, backend="cpu_flash")


META = [
    dict(),
    dict(causal=False, window=(2, 3), backend="torch"),
    dict(softcap=2.0, dropout_p=0.1, sinks=torch.zeros(4, device="meta")),
    dict(
        joint="front",
        **{n: torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16, device="meta") for n in ("joint_k", "joint_v")},
    ),
    dict(cu_seqlens=torch.zeros(3, dtype=torch.int64, device="meta")),
]


@pytest.mark.parametrize("keywords", META)
def test_shapes_are_found_without_memory(keywords):
    shapes = dict(q=(1, 1 << 14, 4, 8), k=(1, 1 << 14, 2, 8), v=(1, 1 << 14, 2, 8))
    x = {n: torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for n, s in shapes.items()}
    out = attention(**x, **keywords)
    assert [*map(list, (out.o.shape, out.lse.shape))] == [[1, 1 << 14, 4, 8], [1, 4, 1 << 14]]
    assert [d.shape for d in torch.autograd.grad(out.o.sum(), list(x.values()))] == list(shapes.values())


GOOD = dict(q=(2, 6, 4, 8), k=(2, 6, 2, 8), v=(2, 6, 2, 8))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(q=torch.zeros(2, 6, 8)), "q"),
        (dict(q=None), "q"),
        (dict(k=None), "k"),
        (dict(v=torch.zeros(2, 6, 2, 8).to_sparse()), "v"),
        (dict(q=torch.zeros(2, 6, 4, 8, dtype=torch.int64)), "q"),
        (dict(q=torch.zeros(2, 6, 3, 8)), "q"),
        (dict(k=torch.zeros(2, 6, 2, 9)), "k"),
        (dict(k=torch.zeros(2, 6, 2, 8, dtype=torch.float64)), "k"),
        (dict(v=torch.zeros(2, 7, 2, 8)), "v"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(alibi_slopes=torch.zeros(3)), "alibi_slopes"),
        (dict(alibi_slopes=torch.zeros(4, requires_grad=True)), "alibi_slopes"),
        (dict(alibi_slopes=torch.zeros(4, dtype=torch.complex64)), "alibi_slopes"),
        (dict(causal=1), "causal"),
        (dict(q=torch.zeros(2, 6, 4, 0), k=torch.zeros(2, 6, 2, 0)), "q"),
        (dict(scale="1"), "scale"),
        (dict(scale=math.inf), "scale"),
        (dict(softcap=-1.0), "softcap"),
        (dict(softcap=math.nan), "softcap"),
        (dict(window=(1,)), "window"),
        (dict(window=(-2, 0)), "window"),
        (dict(window=(True, 0)), "window"),
        (dict(dropout_p=1.0), "dropout_p"),
        (dict(dropout_p=0.1, dropout_seed=-1), "dropout_seed"),
        (dict(dropout_p=0.1, dropout_seed=True), "dropout_seed"),
        (dict(joint="left"), "joint"),
        (dict(joint="front"), "joint"),
        (dict(joint_k=torch.zeros(2, 1, 2, 8), joint_v=torch.zeros(2, 1, 2, 8)), "joint"),
        (dict(joint="rear", joint_k=torch.zeros(2, 1, 2, 8), joint_v=torch.zeros(2, 1, 2, 8)), "joint"),
        (dict(joint="front", joint_k=torch.zeros(2, 1, 2, 8), joint_v=torch.zeros(2, 2, 2, 8)), "joint_v"),
        (dict(layout="zigzag"), "layout"),
        (dict(kv_layout="zigzag"), "kv_layout"),
        (dict(strategy="ring"), "strategy"),
        (dict(backend="cutlass"), "backend"),
        (dict(cu_seqlens=torch.tensor([0, 6])), "cu_seqlens"),
    ],
)
def test_bad_arguments_are_named(change, name):
    tensors = {n: torch.zeros(s) for n, s in GOOD.items()}
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected"):
        attention(**(tensors | change))


@pytest.mark.parametrize("cu", [[1, 6], [0, 4, 3, 6], [0, 5], [0.0, 6.0]])
def test_bad_offsets_are_named(cu):
    x = torch.zeros(1, 6, 2, 8)
    with pytest.raises(ring_la.ArgumentError, match=r"^cu_seqlens: expected"):
        attention(x, x, x, cu_seqlens=torch.tensor(cu))


def test_a_backend_that_cannot_is_an_error_that_names_one_that_can():
    x = torch.zeros(1, 6, 2, 8)
    with pytest.raises(ring_la.UnsupportedError, match=r"no softcap.*These can: .*torch"):
        attention(x, x, x, softcap=1.0, backend="cpu_flash")
    assert "torch" in BACKENDS


def refuse_on_every_rank(rank: int) -> list[str]:
    cp = ring_la.ContextParallel(group(2), scan="ring")
    layout = cp.layout(10)
    x, seen = torch.zeros(1, layout.local_length, 2, 8), []
    calls = [
        dict(softcap=-1.0) if rank == 0 else {},  # one rank's mistake is every rank's error
        dict(causal=bool(rank)),
        dict(strategy="usp"),
        dict(cu_seqlens=torch.tensor([0, 5])),
        dict(backend="reference"),
        dict(kv_layout=cp.layout(11)),
        dict(softcap=2.0, backend="cpu_flash"),
    ]
    for call in calls:
        with pytest.raises(ring_la.RingLAError) as caught:
            attention(x, x, x, layout=layout, **call)
        seen.append(type(caught.value).__name__)
    return seen


def test_every_rank_gets_the_same_error(ranks):
    first, second = ranks.run(2, refuse_on_every_rank)
    assert first == second
    assert first[:2] == ["DisagreementError"] * 2


def test_second_derivative_is_refused():
    x = [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3)]
    (grad,) = torch.autograd.grad(attention(*x).o.sum(), x[:1], create_graph=True)
    with pytest.raises(ring_la.SecondDerivativeError):
        grad.sum().backward()


def test_the_operator_has_a_right_schema_and_fake():
    x = [torch.randn(1, 7, 2, 4, requires_grad=True) for _ in range(3)]
    call = AttentionCall(Scores(0.5, right=0), "none", None)
    arguments = operator.flat(Tensors(*x, sinks=torch.randn(2, requires_grad=True)), call)
    torch.library.opcheck(torch.ops.ring_la.attention.default, arguments)


def test_compiled_with_varying_lengths():
    def layer(q, k, v):
        return attention(q * 2, k, v, dropout_p=0.1, dropout_seed=3).o.sin()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (8, 9, 33):
        x = [torch.randn(1, T, 2, 4, requires_grad=True) for _ in range(3)]
        got, want = compiled(*x), layer(*x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


def compiled_and_replayed(rank: int) -> None:
    """Under a layout: compiled, under autocast, and inside a checkpoint whose backward repeats the exchange."""
    cp = ring_la.ContextParallel(group(2), scan="ring")
    for T in (21, 40):
        layout = cp.layout(T)

        def layer(q, k, v):
            return attention(q * 2, k, v, layout=layout, dropout_p=0.2, dropout_seed=3).o.sin()  # noqa: B023

        torch.manual_seed(0)
        x = [layout.shard(torch.randn(1, T, 2, 8)).requires_grad_() for _ in range(3)]
        want = layer(*x)
        wanted = torch.autograd.grad(want.sum(), x)
        for again in (
            torch.compile(layer, dynamic=True, backend="aot_eager"),
            lambda *x: checkpoint(layer, *x, use_reentrant=False),
        ):
            got = again(*x)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x[0], x[1].bfloat16(), x[2], layout=layout)
    assert out.o.dtype == torch.bfloat16
    assert out.lse.dtype == torch.float32


def test_compiled_and_replayed_under_a_layout(ranks):
    ranks.run(2, compiled_and_replayed)


def test_rows_that_see_nothing_and_zero_keys():
    q, k = torch.randn(1, 5, 2, 4, requires_grad=True), torch.randn(1, 3, 2, 4)
    out = attention(q, k, k)  # the first two queries stand before the first key
    assert torch.equal(out.o[:, :2], torch.zeros(1, 2, 2, 4))
    assert torch.isneginf(out.lse[:, :, :2]).all()
    out.o.sum().backward()
    assert torch.equal(q.grad[:, :2], torch.zeros(1, 2, 2, 4))
    none = attention(q, k[:, :0], k[:, :0], causal=False)
    assert torch.equal(none.o, torch.zeros_like(none.o))
