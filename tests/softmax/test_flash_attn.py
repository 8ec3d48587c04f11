"""The flash-attn adapters against stand-ins with each version's signature, exact inside.

The signatures are those of flash-attn 2.8.3, of its Hopper build of version 3 (fa3-fwd 0.0.3 has the forward) and of
flash-attn-4 4.0.0b36; a wrong keyword, order or number of results fails here. `benchmarks.attention.kernels` and
`pytest -m gpu tests/gpu/test_attention.py` run the packages themselves.
"""

from __future__ import annotations

import dataclasses
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from ring_la.errors import UnsupportedError
from ring_la.kernels import gpu
from ring_la.layout import Layout
from ring_la.softmax import attention
from ring_la.softmax.backends import BACKENDS, Ask, QueryRows, choose, flash_attn, packs, varlen
from ring_la.softmax.backends.aten import Flash
from ring_la.softmax.backends.sage import SageAttention
from ring_la.softmax.backends.varlen import VarlenBackend
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Gradients, Partial, row_sums
from ring_la.softmax.scores import Scores
from tests.support.attention_cases import error

calls: list[str] = []
determinism: list[bool] = []


def hidden(n, m, causal, left, right):
    """What FlashAttention masks: it takes a bound of as many keys as there are for none, and, beside a bound on the
    other side, none for as many keys as there are."""
    left, right = (-1 if bound >= m else bound for bound in (left, right))
    right = 0 if causal else right
    left, right = m if left < 0 <= right else left, m if right < 0 <= left else right
    ahead = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
    return ((ahead > right) & (right >= 0)) | ((ahead < -left) & (left >= 0))


def capped(q, k, scale, softcap):
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return softcap * torch.tanh(s / softcap) if softcap else s


def block(q, k, v, scale, causal, left, right, softcap=0.0):
    """(o, lse) and the probabilities of ``[B, T, H, D]`` under flash-attn's mask."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = capped(q, k, scale, softcap)
    s = s.masked_fill(hidden(q.shape[1], k.shape[1], causal, left, right), -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse[..., None]), v), lse, torch.exp(s - lse[..., None])


def block_backward(do, q, k, v, o, lse, scale, causal, left, right, softcap=0.0):
    groups = k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(q.shape[2] // groups, 2) for x in (k, v))
    s = capped(q, wide_k, scale, softcap)
    slope = 1 - (s / softcap) ** 2 if softcap else 1
    s = s.masked_fill(hidden(q.shape[1], k.shape[1], causal, left, right), -torch.inf)
    p = torch.exp(s - lse[..., None])  # with the global lse
    ds = p * (torch.einsum("bihd,bjhd->bhij", do, wide_v) - (do * o).sum(-1).transpose(1, 2)[..., None])
    ds = ds * slope
    dq = torch.einsum("bhij,bjhd->bihd", ds, wide_k) * scale
    dk = torch.einsum("bhij,bihd->bjhd", ds, q) * scale
    dv = torch.einsum("bhij,bihd->bjhd", p, do)
    return dq, *(x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))


def each(cu_q, cu_k):
    return [
        (slice(*a), slice(*b))
        for a, b in zip(zip(cu_q.tolist(), cu_q.tolist()[1:]), zip(cu_k.tolist(), cu_k.tolist()[1:]))
    ]


def packed(q, k, v, cu_q, cu_k, *mask):
    parts = [block(q[None, a], k[None, b], v[None, b], *mask)[:2] for a, b in each(cu_q, cu_k)]
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def packed_backward(do, q, k, v, o, lse, dq, dk, dv, cu_q, cu_k, *mask):
    for a, b in each(cu_q, cu_k):
        inputs = (do[None, a], q[None, a], k[None, b], v[None, b], o[None, a], lse[None, :, a])
        for into, grad in zip((dq[a], dk[b], dv[b]), block_backward(*inputs, *mask)):
            into.copy_(grad[0])


class Two:
    """flash_attn.flash_attn_interface of 2.8."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        calls.append("dense")
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        o, lse, _ = block(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
        return o, lse, torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        grads = block_backward(dout, q, k, v, out, softmax_lse, *mask)
        determinism.append(deterministic)
        for into, grad in zip((dq, dk, dv), grads):
            into.copy_(grad)
        return torch.empty(0)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        calls.append("varlen")
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        return *packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *mask), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        packed_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *mask)
        return torch.empty(0)


class Three:
    """flash_attn_interface, the Hopper build."""

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
        num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        calls.append("dense" if cu_seqlens_q is None else "varlen")
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        if q.dtype == torch.float8_e4m3fn:
            assert [len(x) for x in (q_descale, k_descale)] == [len(q) if q.dim() == 4 else len(cu_seqlens_q) - 1] * 2
            q_descale = q_descale.repeat_interleave(q.shape[-2] // k.shape[-2], 1)  # all sequences have one's
            q, k, v = (x.double() * s[:1, :, None] for x, s in ((q, q_descale), (k, k_descale), (v, v_descale)))
        if cu_seqlens_q is None:
            return *block(q, k, v, *mask)[:2], torch.empty(0), torch.empty(0)
        return *packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *mask), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        mask = (softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        if cu_seqlens_q is None:
            for into, grad in zip((dq, dk, dv), block_backward(dout, q, k, v, out, softmax_lse, *mask)):
                into.copy_(grad)
        else:
            packed_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *mask)
        return torch.empty(0)


class Four:
    """flash_attn.cute.interface; only the parameters that a ring may need."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        calls.append("dense" if cu_seqlens_q is None else "varlen")
        assert return_lse
        mask = (softmax_scale, causal, *sides(window_size_left, window_size_right), softcap)
        if cu_seqlens_q is None:
            return *block(q, k, v, *mask)[:2], None, None, None
        return *packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *mask), None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
    ):  # fmt: skip
        mask = (softmax_scale, causal, *sides(window_size_left, window_size_right), softcap)
        if cu_seqlens_q is None:
            return block_backward(dout, q, k, v, out, lse, *mask)
        grads = [torch.empty_like(t) for t in (q, k, v)]
        packed_backward(dout, q, k, v, out, lse, *grads, cu_seqlens_q, cu_seqlens_k, *mask)
        return tuple(grads)


def sides(left, right):
    """Version 4's window, in which None is no bound, as the others write it."""
    assert -1 not in (left, right)
    return tuple(-1 if side is None else side for side in (left, right))


STAND_INS = {"flash_attn_2": Two, "flash_attn_3": Three, "flash_attn_4": Four}
FORWARDS = {"fa3_fwd": Three, "fa3_fwd_fp8": Three}


class ExactFlash(Flash):
    """The adapter of PyTorch's own kernel over exact operators, for its packing and its windows."""

    def call(self, q, k, v, scores, window, pack):
        calls.append("dense" if pack is None else "varlen")
        mask = (scores.scale, window.causal, window.left, window.right)
        if pack is None:
            return block(q, k, v, *mask)[:2]
        return tuple(x[None] for x in packed(q[0], k[0], v[0], pack.q.cu, pack.k.cu, *mask))

    def call_backward(self, x, k, v, scores, window, pack):
        mask, inputs = (scores.scale, window.causal, window.left, window.right), (x.do, x.q, k, v, x.o, x.lse)
        if pack is None:
            return block_backward(*inputs, *mask)
        grads = [torch.empty_like(t) for t in (x.q, k, v)]
        packed_backward(*(t[0] for t in (*inputs, *grads)), pack.q.cu, pack.k.cu, *mask)
        return tuple(grads)


@pytest.fixture
def on_the_cpu(monkeypatch):
    calls.clear()
    monkeypatch.setattr(VarlenBackend, "devices", ("cpu",))
    monkeypatch.setattr(VarlenBackend, "dtypes", (torch.float64,))
    monkeypatch.setitem(BACKENDS, "flash", ExactFlash())
    monkeypatch.setattr(flash_attn, "cute_beta", lambda: flash_attn.LEAST_BETA)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "is_hopper", lambda device: True)
    for name, stand_in in (STAND_INS | FORWARDS).items():
        path = BACKENDS[name].module.split(".")
        for i in range(1, len(path) + 1):
            full = ".".join(path[:i])
            if full not in sys.modules:
                package = ModuleType(full)
                package.__spec__, package.__path__ = ModuleSpec(full, None), []
                monkeypatch.setitem(sys.modules, full, package)
        for attribute, function in vars(stand_in).items():
            if attribute.startswith("_flash"):
                monkeypatch.setattr(sys.modules[".".join(path)], attribute, function, raising=False)


@pytest.mark.parametrize("backend", [*STAND_INS, "flash"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("cu", [None, (0, 7, 7, 90, 91, 130, 240)])
def test_blocks_of_any_layout(on_the_cpu, backend, kind, cu):
    torch.manual_seed(0)
    cpu, layout = torch.device("cpu"), Layout(240, kind, 4, cu_seqlens=cu)
    for left, right in ((None, 0), (None, None), (30, 0), (50, 9)):
        for rank, owner in ((1, 1), (2, 0), (0, 3), (3, 2)):
            scores = Scores(0.3, 0.0 if backend == "flash" else 2.0, left=left, right=right)
            rows, keys = (Tokens.of_ranks(layout, [r], cpu) for r in (rank, owner))
            pair = Pair(rows, keys, scores.reach)
            shapes = [(1, len(t), h, 8) for t, h in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))]
            q, k, v, do = (torch.randn(*s, dtype=torch.float64) for s in shapes)
            results = []
            for name in (backend, "torch"):
                out, grads = Partial((1, len(rows), 4, 8), q.dtype, cpu), Gradients.of(q, k, v)
                BACKENDS[name].forward(q, k, v, scores, pair, out)
                o, lse = out.result()
                x = QueryRows(q, o, do, lse, row_sums(do, o, None))
                BACKENDS[name].backward(x, k, v, scores, pair, grads)
                results.append([o, lse, *(total.result(q.dtype) for total in vars(grads).values())])
            assert all(error(a, b) < 1e-9 for a, b in zip(*results)), (left, right, rank, owner)
    joined = cu is not None and kind != "striped"
    assert ("varlen" in calls) >= joined


def test_more_rows_than_keys(on_the_cpu):
    """FlashAttention cannot name every band of such a rectangle: rows saw too few keys, or too many."""
    rows, cpu = Tokens.whole(90, torch.device("cpu")), torch.device("cpu")
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (90, 20, 20))
    for left, right, shift in ((None, 0, 30), (None, 7, -3), (25, 0, 10), (5, None, 20), (40, 9, 0)):
        scores, keys, results = Scores(0.3, left=left, right=right), Tokens.whole(20, cpu, shift=shift), []
        for name in ("flash", "torch"):
            out = Partial(q.shape, q.dtype, cpu)
            BACKENDS[name].forward(q, k, v, scores, Pair(rows, keys, scores.reach), out)
            results.append(out.result())
        assert all(error(a, b) < 1e-9 for a, b in zip(*results)), (left, right, shift)


@pytest.mark.parametrize("backend", STAND_INS)
def test_through_the_public_function(on_the_cpu, backend):
    q, k, v = (torch.randn(2, 30, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    got, want = attention(q, k, v, backend=backend), attention(q, k, v, backend="reference")
    assert error(got.o, want.o) < 1e-9
    grads = [torch.autograd.grad(x.o.sum(), (q, k, v)) for x in (got, want)]
    assert all(error(a, b) < 1e-9 for a, b in zip(*grads))


def test_the_forward_of_version_3_alone(on_the_cpu):
    q, k, v = (torch.randn(2, 30, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    for how in (dict(softcap=3.0), dict(causal=False)):
        assert error(*(attention(q, k, v, **how, backend=b).o for b in ("fa3_fwd", "reference"))) < 1e-9
    for refused, leaf in ((dict(window=(4, 0)), q), (dict(), q.clone().requires_grad_())):
        with pytest.raises(UnsupportedError, match=r"windows|gradients"):
            attention(leaf, k, v, **refused, backend="fa3_fwd")


@pytest.mark.parametrize("cu", [None, torch.tensor([0, 10, 14, 30])])
def test_rounded_to_fp8(on_the_cpu, cu):
    """As exact as three bits of mantissa let it be, whatever a head's size."""
    q, k, v = (torch.randn(1, 30, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    k[:, :, 1] *= 1e3
    got, want = (attention(q, k, v, scale=1e-3, cu_seqlens=cu, backend=b).o for b in ("fa3_fwd_fp8", "reference"))
    assert 1e-3 < error(got, want) < 0.08
    with pytest.raises(UnsupportedError, match=r"gradients"):
        attention(q.clone().requires_grad_(), k, v, backend="fa3_fwd_fp8")


def test_gradients_of_the_same_bits_only_where_asked(on_the_cpu):
    """They take the kernel longer. It was asked for them always."""
    ask, taken = Ask(torch.device("cpu"), torch.float64, 2, 2, 8, 8), []
    for repeatable in (False, True):
        x = QueryRows(*torch.randn(3, 1, 5, 2, 8).double(), torch.zeros(1, 2, 5).double())
        kernel = choose(dataclasses.replace(ask, repeatable=repeatable), "flash_attn_2")
        determinism.clear()
        kernel.call_backward(x, x.q, x.q, Scores(0.3), varlen.Window(True), None)
        taken += determinism
    assert taken == [False, True]


@pytest.mark.parametrize("window", [(-1, -1), (6, 0)])
def test_one_call_for_all_documents(on_the_cpu, window, monkeypatch):
    """Long ones and short ones, under a window too: each long one took a call, and each one that a window cut."""
    monkeypatch.setattr(packs, "LARGE", 100)
    cu = torch.tensor([0, 10, 14, 40])
    q = torch.randn(1, 40, 2, 8, dtype=torch.float64)
    got = attention(q, q, q, cu_seqlens=cu, window=window, backend="flash")
    assert calls == ["varlen"]
    assert error(got.o, attention(q, q, q, cu_seqlens=cu, window=window, backend="reference").o) < 1e-9


def test_the_fastest_is_chosen(on_the_cpu, monkeypatch):
    """Among kernels that can do a call: measured on an H200."""
    monkeypatch.setattr(varlen, "has_triton", lambda: True)
    monkeypatch.setattr(BACKENDS["triton"], "unsupported", lambda ask: "")
    ask = Ask(torch.device("cpu"), torch.float64, 4, 4, 128, 128, windowed=True, rows=4096)
    capped = dataclasses.replace(ask, beyond=frozenset({"softcap"}))
    assert {choose(a, None).name for a in (ask, capped)} == {"flash_attn_4"}
    monkeypatch.setattr(flash_attn, "cute_beta", lambda: flash_attn.LEAST_BETA - 1)
    for width, rows, best in ((128, 4096, "triton"), (128, 8, "flash"), (64, 4096, "flash"), (256, 4096, "triton")):
        assert choose(dataclasses.replace(ask, width=width, value_width=width, rows=rows), None).name == best
    assert choose(capped, None).name == "flash_attn_2"


def test_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(VarlenBackend, "devices", ("cpu",))
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    x = torch.zeros(1, 6, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="is not installed"):
        attention(x, x, x, backend="flash_attn_3")


def sageattn(
    q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **others
):  # fmt: skip
    """sageattention.core.sageattn of 2.2."""
    assert (tensor_layout, return_lse, others) == ("NHD", True, {})
    calls.append("sage")
    return block(*(x.float() for x in (q, k, v)), sm_scale, is_causal, -1, -1)[:2]


def sageattn_of_1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **others):
    """sageattention.core.sageattn of 1.0.6: one tensor, whatever else is asked."""
    return block(*(x.float() for x in (q, k, v)), sm_scale, is_causal, -1, -1)[0].to(q.dtype)


def install_sage(monkeypatch, function):
    package = ModuleType("sageattention")
    package.__spec__, package.sageattn = ModuleSpec("sageattention", None), function
    monkeypatch.setitem(sys.modules, "sageattention", package)


def test_sage_attention_forward(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, h, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    with pytest.raises(UnsupportedError, match="not on a CUDA device"):
        attention(q, k, v, backend="sage")
    monkeypatch.setattr(SageAttention, "devices", ("cpu",))
    with pytest.raises(UnsupportedError, match="sageattention is not installed"):
        attention(q, k, v, backend="sage")
    install_sage(monkeypatch, sageattn)
    calls.clear()
    for causal in (True, False):
        assert error(attention(q, k, v, causal=causal, backend="sage").o, attention(q, k, v, causal=causal).o) < 1e-2
    assert calls == ["sage"] * 2
    with pytest.raises(UnsupportedError, match="gradients"):
        attention(q.requires_grad_(), k, v, backend="sage")


def test_sage_attention_that_returns_no_sums(monkeypatch):
    """Two sequences' outputs were taken for outputs and sums."""
    monkeypatch.setattr(SageAttention, "devices", ("cpu",))
    install_sage(monkeypatch, sageattn_of_1)
    q = torch.randn(2, 20, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="sageattn has no return_lse, as before version 2"):
        attention(q, q, q, backend="sage")


def test_a_package_that_lacks_another_says_which(tmp_path, monkeypatch):
    """Not that it is itself missing, which sends people in a circle."""
    (tmp_path / "half_installed").mkdir()
    (tmp_path / "half_installed" / "__init__.py").write_text("import a_library_that_nobody_has.inside")
    monkeypatch.syspath_prepend(str(tmp_path))
    why = flash_attn.missing("half_installed.interface")
    assert why == "half_installed.interface cannot be imported: a_library_that_nobody_has is not installed"
    assert flash_attn.missing("nowhere_at_all.interface") == "nowhere_at_all.interface is not installed"
    assert flash_attn.missing("json.decoder") == ""
